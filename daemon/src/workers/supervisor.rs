//! The one owner of one worker process: its link, its task, its clocks, its end.
//!
//! Everything that happens to a worker is a turn of one loop ([`Supervisor::run`]), in this order when several things are
//! due: the process has ended, it wants to attach, it said something, somebody asks for something, a time has come. The
//! loop never waits inside a turn, so a worker can hold up nobody.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use sd_proto::worker::v1::{
    CancelTask, FromWorker, Retire, Task, TaskDone, TaskProgress, ToWorker, Welcome, from_worker, to_worker,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tonic::Status;

use super::clocks::{Clocks, Verdict};
use super::exit::{Clock, ExitReport, ExitStatus, KillCause, RawStatus};
use super::handle::{Command, RunError, WorkerPhase, WorkerView};
use super::link::{AttachRequest, Expected, Refused, RouteGuard, check};
use super::process::{Process, oom_kills};
use super::tail::StderrReader;
use super::{Observer, WorkerLimits};
use crate::ids::JobId;
use crate::residency::LeaseKill;

/// How long what a dead worker had still sent, and its last words, are waited for.
const LAST_WORDS: Duration = Duration::from_millis(50);
/// How long a worker that lost its link may take to exit by itself.
const LINK_LOSS_GRACE: Duration = Duration::from_secs(1);

/// All that the owner of a worker needs.
pub(super) struct Supervisor {
    pub(super) process: Process,
    pub(super) stderr: StderrReader,
    pub(super) expected: Expected,
    pub(super) route: RouteGuard,
    pub(super) attaching: mpsc::Receiver<AttachRequest>,
    pub(super) commands: mpsc::UnboundedReceiver<Command>,
    pub(super) view: watch::Sender<WorkerView>,
    pub(super) exit: watch::Sender<Option<Arc<ExitReport>>>,
    pub(super) ready: oneshot::Sender<()>,
    pub(super) shutdown: watch::Receiver<Option<Duration>>,
    pub(super) observer: Arc<dyn Observer>,
    pub(super) limits: WorkerLimits,
}

type Reply = oneshot::Sender<Result<TaskDone, RunError>>;

struct Assignment {
    task: Box<Task>,
    progress: mpsc::Sender<TaskProgress>,
    reply: Reply,
}

struct Running {
    id: u64,
    progress: mpsc::Sender<TaskProgress>,
    reply: Reply,
    cancelled: bool,
    /// The worker has run tasks before, and has not said a word about this one: if it turns out to be dead, it may have
    /// been dead before the task was sent.
    unheard: bool,
}

enum LinkState {
    /// Not attached yet; killed at the deadline.
    Awaited {
        deadline: Instant,
        ready: oneshot::Sender<()>,
    },
    Attached {
        to: mpsc::Sender<Result<ToWorker, Status>>,
        from: mpsc::Receiver<FromWorker>,
        clocks: Clocks,
    },
    /// Broken; the process is to exit by itself.
    Lost,
}

/// A stop under way: past the deadline the group is killed for this reason.
struct Stop {
    deadline: Instant,
    cause: KillCause,
}

struct Turn {
    limits: WorkerLimits,
    expected: Expected,
    link: LinkState,
    running: Option<Running>,
    waiting: VecDeque<Assignment>,
    intent: Option<KillCause>,
    stop: Option<Stop>,
    retiring: bool,
    killed: bool,
    /// It has ended a task.
    served: bool,
    oom_baseline: u64,
    observer: Arc<dyn Observer>,
    view: watch::Sender<WorkerView>,
}

impl Supervisor {
    /// Watches the worker from its spawning to its reaping, and reports its end exactly once.
    pub(super) async fn run(self) {
        let Self {
            process, stderr, expected, route, mut attaching, mut commands, view, exit, ready, mut shutdown, ..
        } = self;
        let mut process = process;
        let started = Instant::now();
        let deadline = started + self.limits.handshake;
        let mut turn = Turn {
            limits: self.limits,
            expected,
            link: LinkState::Awaited { deadline, ready },
            running: None,
            waiting: VecDeque::new(),
            intent: None,
            stop: None,
            retiring: false,
            killed: false,
            served: false,
            oom_baseline: oom_kills(),
            observer: self.observer,
            view,
        };
        loop {
            let due = turn.check_times(&process);
            tokio::select! {
                biased;
                () = process.ended() => break,
                Some(request) = attaching.recv() => turn.attach(request, &process),
                message = turn.link.next_message() => turn.hear(message, &process),
                Some(command) = commands.recv() => turn.obey(command, &process),
                Ok(grace) = next_shutdown(&mut shutdown), if !turn.shutting_down() => turn.shut_down(grace, &process),
                () = tokio::time::sleep_until(due) => {}
            }
        }
        turn.hear_last_words().await;
        // Read before the reaping: afterwards nothing tells this death from others.
        let oom = oom_kills() > turn.oom_baseline;
        let pid = process.pid();
        let raw = process.reap();
        drop(route);
        let report = turn.finish(raw, oom, pid, started, stderr).await;
        // Told first: whoever hears of the end and gives its claim back must not have it granted to the next one.
        turn.observer.reaped(report.incarnation);
        let _ = exit.send(Some(Arc::clone(&report)));
        if report.status.is_failure() {
            tracing::warn!(incarnation = report.incarnation, "{report}");
        } else {
            tracing::debug!(incarnation = report.incarnation, "{report}");
        }
        // Whoever asks from now on is told that the worker is gone.
        commands.close();
        while let Ok(command) = commands.try_recv() {
            if let Command::Run { reply, .. } = command {
                let _ = reply.send(Err(RunError::Gone));
            }
        }
        turn.end_tasks(&report);
    }
}

async fn next_shutdown(shutdown: &mut watch::Receiver<Option<Duration>>) -> Result<Duration, watch::error::RecvError> {
    let grace = shutdown.wait_for(Option::is_some).await?;
    Ok(grace.unwrap_or_default())
}

impl LinkState {
    /// The worker's next message; `None` once when its stream has ended. Pending where there is no link.
    async fn next_message(&mut self) -> Option<FromWorker> {
        match self {
            Self::Attached { from, .. } => from.recv().await,
            Self::Awaited { .. } | Self::Lost => std::future::pending().await,
        }
    }
}

impl Turn {
    fn incarnation(&self) -> u64 {
        self.expected.spec.incarnation
    }

    fn shutting_down(&self) -> bool {
        matches!(self.intent, Some(KillCause::Shutdown)) || self.killed
    }

    /// Kills what is overdue and says when to look again.
    fn check_times(&mut self, process: &Process) -> Instant {
        let now = Instant::now();
        let far = now + Duration::from_secs(3600);
        if self.killed {
            return far;
        }
        if let Some(stop) = &self.stop
            && now >= stop.deadline
        {
            let cause = stop.cause.clone();
            self.kill(cause, process);
            return far;
        }
        let link_due = match &mut self.link {
            LinkState::Awaited { deadline, .. } if now >= *deadline => {
                let cause = KillCause::Hung { clock: Clock::Hello, silent: self.limits.handshake };
                self.kill(cause, process);
                return far;
            }
            LinkState::Awaited { deadline, .. } => *deadline,
            LinkState::Attached { clocks, .. } => match clocks.check(now) {
                Verdict::Wait(until) => until,
                Verdict::Kill(cause) => {
                    self.kill(cause, process);
                    return far;
                }
            },
            LinkState::Lost => far,
        };
        self.stop.as_ref().map_or(link_due, |stop| stop.deadline.min(link_due))
    }

    /// Records why, then kills the group. An earlier intent stays: what follows from it is not a new cause, except that a
    /// stop which ran out says more than the stop itself.
    fn kill(&mut self, cause: KillCause, process: &Process) {
        let overdue = matches!(cause, KillCause::RetireDeadline(_));
        if self.intent.is_none() || (overdue && self.intent == Some(KillCause::Retired)) {
            self.intent = Some(cause);
        }
        self.killed = true;
        self.show_phase();
        self.observer.lost(self.incarnation());
        process.signal(Signal::SIGKILL);
    }

    fn stop_by(&mut self, grace: Duration, cause: KillCause) {
        let deadline = Instant::now() + grace;
        if self.stop.as_ref().is_none_or(|stop| deadline < stop.deadline) {
            self.stop = Some(Stop { deadline, cause });
        }
    }

    fn attach(&mut self, request: AttachRequest, process: &Process) {
        let verdict = match &self.link {
            LinkState::Awaited { .. } => check(&self.expected, &request.hello, request.peer),
            LinkState::Attached { .. } | LinkState::Lost if request.peer == self.expected.peer => Err(Refused::Twice),
            LinkState::Attached { .. } | LinkState::Lost => {
                Err(Refused::Stranger { peer: request.peer, incarnation: self.incarnation() })
            }
        };
        if let Err(refused) = verdict {
            tracing::warn!(incarnation = self.incarnation(), "refused to attach: {refused}");
            if refused.condemns() {
                self.kill(KillCause::Handshake(refused.to_string()), process);
            }
            let _ = request.reply.send(Err(refused));
            return;
        }
        let (deliver, from) = mpsc::channel(super::link::QUEUE);
        let to = request.to_worker;
        if request.reply.send(Ok(deliver)).is_err() {
            // The stream broke meanwhile; the worker exits or the deadline comes.
            return;
        }
        let clocks = Clocks::new(self.limits.clocks(), Instant::now());
        let awaited = std::mem::replace(&mut self.link, LinkState::Attached { to, from, clocks });
        let interval = u32::try_from(self.limits.pulse_interval.as_millis()).unwrap_or(u32::MAX);
        self.tell(to_worker::Message::Welcome(Welcome { pulse_interval_ms: interval }), process);
        self.show_phase();
        if let LinkState::Awaited { ready, .. } = awaited {
            if ready.send(()).is_err() {
                // Nobody waits for this worker any more, so nobody would ever use it.
                self.retire(process);
            } else {
                self.next_task(process);
            }
        }
    }

    fn tell(&mut self, message: to_worker::Message, process: &Process) {
        let LinkState::Attached { to, .. } = &self.link else { return };
        match to.try_send(Ok(ToWorker { message: Some(message) })) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => self.lose_link(),
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.kill(KillCause::Protocol("it does not read its messages".into()), process);
            }
        }
    }

    fn lose_link(&mut self) {
        if matches!(self.link, LinkState::Lost) {
            return;
        }
        self.link = LinkState::Lost;
        self.stop_by(LINK_LOSS_GRACE, KillCause::LinkLost);
        self.show_phase();
        self.observer.lost(self.incarnation());
    }

    fn hear(&mut self, message: Option<FromWorker>, process: &Process) {
        let Some(message) = message.map(|m| m.message) else {
            self.lose_link();
            return;
        };
        let now = Instant::now();
        let incarnation = self.incarnation();
        let LinkState::Attached { clocks, .. } = &mut self.link else { return };
        match message {
            Some(from_worker::Message::Pulse(pulse)) => {
                clocks.pulse(now);
                self.view.send_modify(|view| view.device_bytes = pulse.device_bytes);
                self.observer.pulse(incarnation, pulse.device_bytes, pulse.peak_bytes);
            }
            Some(from_worker::Message::LeaseRequest(request)) => self.observer.lease_requested(incarnation, request),
            Some(from_worker::Message::LeaseReturned(returned)) => {
                self.observer.lease_returned(incarnation, returned.lease_id, returned.bytes);
            }
            Some(from_worker::Message::Progress(progress)) => {
                let Some(running) = self.running.as_mut().filter(|r| r.id == progress.task_id) else { return };
                running.unheard = false;
                if let Some(longest) = clocks.progress(&progress, now) {
                    self.observer.block_time(incarnation, longest);
                }
                let _ = running.progress.try_send(progress);
            }
            Some(from_worker::Message::Done(done)) => {
                let id = done.task_id;
                self.view.send_modify(|view| view.weights_bytes = done.weights_bytes);
                self.end_task(id, Ok(done), process);
            }
            Some(from_worker::Message::Failed(failed)) => {
                let (id, error) = (failed.task_id, failed.error());
                self.end_task(id, Err(RunError::Failed { error, message: failed.message }), process);
            }
            Some(from_worker::Message::Hello(_)) => {
                self.kill(KillCause::Protocol("it said hello twice".into()), process);
            }
            // Of a later version of the contract, which the handshake would have refused.
            None => self.kill(KillCause::Protocol("it sent an unknown message".into()), process),
        }
    }

    fn end_task(&mut self, id: u64, result: Result<TaskDone, RunError>, process: &Process) {
        match self.running.take_if(|running| running.id == id) {
            Some(running) => {
                self.served = true;
                if let LinkState::Attached { clocks, .. } = &mut self.link {
                    clocks.task_ended();
                }
                if self.stop.as_ref().is_some_and(|stop| matches!(stop.cause, KillCause::CancelDeadline(_))) {
                    self.stop = None;
                }
                // Shown first, so that whoever hears of the task's end finds the worker idle.
                self.show_phase();
                let _ = running.reply.send(result);
                if self.retiring {
                    self.send_retire(process);
                } else {
                    self.next_task(process);
                }
            }
            None => self.kill(KillCause::Protocol(format!("it ended task {id}, which it was not running")), process),
        }
    }

    fn next_task(&mut self, process: &Process) {
        if self.running.is_some() || !matches!(self.link, LinkState::Attached { .. }) || self.leaving() {
            return;
        }
        // A caller that gave up before its task was sent takes the task with it.
        let Some(next) = std::iter::from_fn(|| self.waiting.pop_front()).find(|next| !next.reply.is_closed()) else {
            return;
        };
        self.oom_baseline = oom_kills();
        let job = JobId::from(next.task.job_id.as_str());
        let id = next.task.task_id;
        let (progress, reply, unheard) = (next.progress, next.reply, self.served);
        self.running = Some(Running { id, progress, reply, cancelled: false, unheard });
        if let LinkState::Attached { clocks, .. } = &mut self.link {
            clocks.task_started(Instant::now());
        }
        self.view.send_modify(|view| view.phase = WorkerPhase::Busy { job, task: id });
        self.tell(to_worker::Message::Task(*next.task), process);
    }

    fn leaving(&self) -> bool {
        self.killed || self.retiring || self.stop.is_some() || self.intent.is_some()
    }

    fn obey(&mut self, command: Command, process: &Process) {
        match command {
            Command::Run { task, progress, reply } => {
                let stays = !self.killed && !self.retiring && self.intent.is_none();
                if stays && !matches!(self.link, LinkState::Lost) {
                    self.waiting.push_back(Assignment { task, progress, reply });
                    self.next_task(process);
                } else {
                    let _ = reply.send(Err(RunError::Gone));
                }
            }
            Command::Cancel { task } => {
                self.waiting.retain(|waiting| waiting.task.task_id != task);
                let Some(running) = self.running.as_mut().filter(|r| r.id == task && !r.cancelled) else { return };
                running.cancelled = true;
                let patience = self.limits.cancel;
                self.stop_by(patience, KillCause::CancelDeadline(patience));
                self.tell(to_worker::Message::Cancel(CancelTask { task_id: task }), process);
            }
            Command::Send(message) => {
                if let Some(message) = message.message {
                    self.tell(message, process);
                }
            }
            Command::Retire => self.retire(process),
            Command::Kill(cause) => self.kill(cause, process),
        }
    }

    fn retire(&mut self, process: &Process) {
        if self.retiring || self.killed {
            return;
        }
        self.retiring = true;
        for waiting in self.waiting.drain(..) {
            let _ = waiting.reply.send(Err(RunError::Gone));
        }
        self.show_phase();
        if self.running.is_none() {
            self.send_retire(process);
        }
    }

    fn send_retire(&mut self, process: &Process) {
        let patience = self.limits.retire;
        self.stop_by(patience, KillCause::RetireDeadline(patience));
        match self.link {
            LinkState::Attached { .. } => self.tell(to_worker::Message::Retire(Retire {}), process),
            // It holds nothing yet and would not hear of it.
            LinkState::Awaited { .. } | LinkState::Lost => self.kill(KillCause::Retired, process),
        }
    }

    fn shut_down(&mut self, grace: Duration, process: &Process) {
        self.intent.get_or_insert(KillCause::Shutdown);
        // The tasks are lost either way; a stop that is under way must not end before the shutdown's own.
        self.stop = None;
        self.stop_by(grace, KillCause::Shutdown);
        self.show_phase();
        process.signal(Signal::SIGTERM);
        // A process that was stopped would not see it.
        process.signal(Signal::SIGCONT);
    }

    fn show_phase(&self) {
        let phase = match (&self.link, &self.running) {
            _ if self.killed || self.retiring || self.intent.is_some() => WorkerPhase::Stopping,
            (LinkState::Lost, _) => WorkerPhase::Stopping,
            (LinkState::Awaited { .. }, _) => WorkerPhase::Starting,
            (LinkState::Attached { .. }, None) => WorkerPhase::Idle,
            (LinkState::Attached { .. }, Some(_)) => return,
        };
        self.view.send_modify(|view| view.phase = phase);
    }

    /// Takes what the worker had sent before it died: a task that it finished is finished, and its sealed output stays.
    async fn hear_last_words(&mut self) {
        let LinkState::Attached { from, .. } = &mut self.link else { return };
        let mut done = None;
        let listen = async {
            while let Some(message) = from.recv().await {
                if let Some(from_worker::Message::Done(last)) = message.message {
                    done = Some(last);
                }
            }
        };
        let _ = tokio::time::timeout(LAST_WORDS, listen).await;
        if let Some(done) = done
            && let Some(running) = self.running.take_if(|running| running.id == done.task_id)
        {
            let _ = running.reply.send(Ok(done));
        }
    }

    async fn finish(
        &mut self,
        raw: RawStatus,
        oom: bool,
        pid: u32,
        started: Instant,
        stderr: StderrReader,
    ) -> Arc<ExitReport> {
        let intent = match self.intent.take() {
            None if self.retiring => Some(KillCause::Retired),
            intent => intent,
        };
        let status = ExitStatus::classify(raw, intent.as_ref(), oom);
        self.killed = true;
        self.show_phase();
        Arc::new(ExitReport {
            incarnation: self.incarnation(),
            pid,
            status,
            intent,
            stderr: stderr.finish(LAST_WORDS).await,
            lived: started.elapsed(),
        })
    }

    fn end_tasks(&mut self, report: &Arc<ExitReport>) {
        if let Some(running) = self.running.take() {
            let report = Arc::clone(report);
            let error = match &report.status {
                // It was killed or froze while it was idle, and its death and the task crossed: such a death costs the job that
                // the worker works for, and it worked for none.
                ExitStatus::Signal(libc::SIGKILL) | ExitStatus::Killed(KillCause::Hung { clock: Clock::Pulse, .. })
                    if running.unheard =>
                {
                    RunError::Gone
                }
                ExitStatus::Killed(KillCause::Hung { .. } | KillCause::Lease(LeaseKill::TermExpired(_))) => {
                    RunError::Hung(report)
                }
                ExitStatus::Killed(KillCause::Protocol(_)) => RunError::Protocol(report),
                _ => RunError::Died(report),
            };
            let _ = running.reply.send(Err(error));
        }
        for waiting in self.waiting.drain(..) {
            let _ = waiting.reply.send(Err(RunError::Gone));
        }
    }
}
