//! The handle to the residency, and what a request gives.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{broadcast, mpsc, oneshot};

use super::device::DeviceConfig;
use super::lease::{GrantedLease, Incarnation, LeaseId, LeaseKill, LeaseVector, Proof, Purpose, Refusal, RequestId};
use super::ledger::{Decision, Upcoming};
use super::service::{self, Command};
use super::view::DeviceSnapshot;
use crate::arena::{Arena, Reservation};
use crate::clock::Clock;
use crate::ids::{DeviceId, JobId, Tenant};
use crate::journal::Journal;

/// Who carries out what the ledger decides about processes: the supervisor of the workers. Called from the residency's
/// owner task, so nothing here may block or wait for the residency. A call about a process that is gone already changes
/// nothing.
pub trait Holders: Send + Sync + 'static {
    /// Tells the process what it may hold. `request_id` answers its own request; 0: unasked.
    fn grant(&self, incarnation: Incarnation, lease: GrantedLease, request_id: u64, term: Duration);
    /// Tells the process to give a lease back down to `to` bytes within `deadline`. Its answer goes to
    /// [`Residency::returned`].
    fn revise(&self, incarnation: Incarnation, lease: LeaseId, to: u64, deadline: Duration);
    /// Tells the process that a release is proven.
    fn proof(&self, incarnation: Incarnation, lease: LeaseId, bytes: u64, proof: Proof);
    /// Asks the process to free everything and exit.
    fn retire(&self, incarnation: Incarnation);
    /// Kills the process; the cause is recorded before the signal. Its death comes back by [`Residency::holder_reaped`].
    fn kill(&self, incarnation: Incarnation, cause: LeaseKill);
}

/// The handle to the residency. Clones are handles to the same one; its owner task ends when the last one is gone.
#[derive(Clone)]
pub struct Residency {
    commands: mpsc::UnboundedSender<Command>,
    decisions: broadcast::Sender<Decision>,
}

impl fmt::Debug for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Residency").finish_non_exhaustive()
    }
}

impl Residency {
    /// Starts the owner task of `devices` on the current runtime. Grants of shared memory come out of `arena`; every decision is
    /// written into `journal`.
    pub fn start(devices: Vec<DeviceConfig>, arena: Arena, clock: Arc<dyn Clock>, journal: Journal) -> Self {
        let (commands, inbox) = mpsc::unbounded_channel();
        let (decisions, _) = broadcast::channel(1024);
        let weak = commands.downgrade();
        tokio::spawn(service::run(devices, arena, clock, journal, inbox, weak, decisions.clone()));
        Self { commands, decisions }
    }

    /// Who carries out decisions about processes. To be called once, before the first process is started.
    pub fn set_holders(&self, holders: Arc<dyn Holders>) {
        self.send(Command::SetHolders(holders));
    }

    /// Asks for everything one stage task needs, and waits in order until it is granted as a whole. The process may run
    /// already (then what it holds counts) or be yet to be started: none may be started before this returns. While the
    /// process works for another task, the request waits for that task's end.
    ///
    /// Dropping the future withdraws the request.
    ///
    /// # Errors
    /// [`Refusal::DoesNotFit`] and [`Refusal::SharedMemory`] at once, with the numbers, for what can never be granted;
    /// [`Refusal::HolderGone`] when the process is or becomes unavailable: ask again for a new incarnation.
    pub async fn request(&self, vector: LeaseVector) -> Result<Granted, Refusal> {
        let (reply, answer) = oneshot::channel();
        let id = RequestId(service::next_number());
        let device = vector.device.clone();
        self.send(Command::Request { id, vector, reply });
        let withdraw = OnDrop { commands: self.commands.clone(), command: Some(Command::Withdraw { device, id }) };
        let outcome = answer.await.unwrap_or(Err(Refusal::ShuttingDown));
        withdraw.disarm();
        outcome
    }

    /// Waits for the device's compute token: one stage task computes at a time, first come first served. Take it after
    /// the grant, never before, and drop it when the task has ended.
    ///
    /// # Errors
    /// [`Refusal::NoDevice`], [`Refusal::ShuttingDown`].
    pub async fn compute(&self, device: &DeviceId, job: &JobId) -> Result<ComputeToken, Refusal> {
        let (reply, answer) = oneshot::channel();
        let id = RequestId(service::next_number());
        let (device, job) = (device.clone(), job.clone());
        self.send(Command::Compute { device: device.clone(), id, job, reply });
        let withdraw = OnDrop { commands: self.commands.clone(), command: Some(Command::ComputeEnded { device, id }) };
        let outcome = answer.await.unwrap_or(Err(Refusal::ShuttingDown));
        withdraw.disarm();
        outcome
    }

    /// The process of `incarnation` is about to be started or has just been, as `pid`. From now on only proof frees its
    /// leases.
    pub fn holder_spawned(&self, incarnation: Incarnation, pid: u32) {
        self.send(Command::Spawned { incarnation, pid });
    }

    /// The process can hear now (its handshake is done): it is told every lease it has. Returns when
    /// [`Holders::grant`] has been called for each, so a task that is sent afterwards arrives after them.
    pub async fn holder_attached(&self, incarnation: Incarnation) {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Attached { incarnation, reply });
        let _ = answer.await;
    }

    /// The process is dead or about to be (its link broke, somebody killed it), but not reaped yet: nothing more is granted to
    /// it.
    pub fn holder_lost(&self, incarnation: Incarnation) {
        self.send(Command::Lost { incarnation });
    }

    /// The process is reaped, or could not be started after [`Residency::holder_spawned`].
    pub fn holder_reaped(&self, incarnation: Incarnation) {
        self.send(Command::Reaped { incarnation });
    }

    /// The process lives and measured itself. Renews its leases' term.
    pub fn pulse(&self, incarnation: Incarnation, device_bytes: u64, peak_bytes: u64) {
        self.send(Command::Pulse { incarnation, device_bytes, peak_bytes });
    }

    /// The process says that it holds no more than `bytes` of a lease from now on.
    pub fn returned(&self, incarnation: Incarnation, lease: LeaseId, bytes: u64) {
        self.send(Command::Returned { incarnation, lease, bytes });
    }

    /// The process asks, while it works, for `min` to `want` bytes beyond what it holds for `purpose`. Answered by
    /// [`Holders::grant`] with its `request_id`, at once: with more bytes, or with what it has.
    pub fn extend(&self, incarnation: Incarnation, request_id: u64, purpose: Purpose, min: u64, want: u64) {
        self.send(Command::Extend { incarnation, request_id, purpose, min, want });
    }

    /// The longest time that the process was seen to take from one boundary, at which it can give back, to the next.
    pub fn block_time(&self, incarnation: Incarnation, time: Duration) {
        self.send(Command::BlockTime { incarnation, time });
    }

    /// Has a process give its working set back as soon as it is idle; what it has beyond the floor of a running task, now.
    pub fn shrink(&self, incarnation: Incarnation) -> Released {
        self.watched(|reply| Command::GiveBack { incarnation, weights: false, reply })
    }

    /// Has a process give its weights and its working set back as soon as it is idle; process and context stay.
    pub fn park(&self, incarnation: Incarnation) -> Released {
        self.watched(|reply| Command::GiveBack { incarnation, weights: true, reply })
    }

    /// Retires a process as soon as it is idle.
    pub fn retire(&self, incarnation: Incarnation) -> Released {
        self.watched(|reply| Command::Retire { incarnation, reply })
    }

    /// What a process has been asked to give back, from now on until all of it is proven to be gone.
    pub fn released(&self, incarnation: Incarnation) -> Released {
        self.watched(|reply| Command::Watch { incarnation, reply })
    }

    /// Keeps a process from being taken off the device for others, or ends that. A device whose capacity shrinks, and who asks for
    /// this process by name ([`Residency::park`], [`Residency::retire`], [`Residency::hold`]), takes it nevertheless. What cannot be
    /// granted beside the pinned is refused ([`Refusal::Pinned`]).
    pub fn pin(&self, incarnation: Incarnation, pinned: bool) {
        self.send(Command::Pin { incarnation, pinned });
    }

    /// Gives a device to other programs: every process leaves it, busy ones when their tasks end (what they have beyond their floor
    /// goes at once). With a time, nothing is granted there until it is over or [`Residency::unhold`]; without, requests are
    /// granted as before. The answer comes when every process that was there has left.
    pub fn hold(&self, device: &DeviceId, time: Option<Duration>) -> Released {
        self.watched(|reply| Command::Hold { device: device.clone(), time, reply })
    }

    /// Ends a hold.
    pub fn unhold(&self, device: &DeviceId) {
        self.send(Command::Unhold { device: device.clone() });
    }

    /// Bytes that could be granted on a device now; 0 while it is held, `None` without such a device.
    pub async fn available(&self, device: &DeviceId) -> Option<u64> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Available { device: device.clone(), reply });
        answer.await.ok().flatten()
    }

    /// Tells what queued and running jobs have not come to yet, the next stage first; replaces what was told before. Decides who is
    /// taken off first, and keeps bytes that the next stage needs from being given away beyond others' needs.
    pub fn set_upcoming(&self, stages: Vec<Upcoming>) {
        self.send(Command::Upcoming { stages });
    }

    /// Whether the queue is read ([`Residency::set_upcoming`]); it is unless this is called, for comparison.
    pub fn read_queue(&self, read: bool) {
        self.send(Command::ReadQueue { read });
    }

    /// How the devices are shared among tenants, in parts; a tenant that is not named has one. Replaces what was set before.
    pub fn set_shares(&self, parts: BTreeMap<Tenant, u32>) {
        self.send(Command::Shares { parts });
    }

    /// Every device as it stands.
    pub async fn snapshot(&self) -> Vec<DeviceSnapshot> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Snapshot { reply });
        answer.await.unwrap_or_default()
    }

    /// What the ledgers decide from now on, for explanation.
    pub fn decisions(&self) -> broadcast::Receiver<Decision> {
        self.decisions.subscribe()
    }

    fn watched(&self, command: impl FnOnce(oneshot::Sender<u64>) -> Command) -> Released {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply));
        Released { answer }
    }

    fn send(&self, command: Command) {
        // The owner task ends only when the runtime does; then there is nobody left to care.
        let _ = self.commands.send(command);
    }
}

/// Sends a command when dropped, unless disarmed.
struct OnDrop {
    commands: mpsc::UnboundedSender<Command>,
    command: Option<Command>,
}

impl OnDrop {
    fn disarm(mut self) {
        self.command = None;
    }
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(command) = self.command.take() {
            let _ = self.commands.send(command);
        }
    }
}

/// What becomes of a process when its task has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Afterwards {
    /// It stays warm with all its leases until somebody needs the bytes.
    #[default]
    Keep,
    /// It gives its working set back and keeps its weights.
    ReturnWorkingSet,
    /// It gives weights and working set back and keeps its context.
    Park,
    /// It exits.
    Retire,
}

/// A granted request: the claim of one task on one process. While it lives, the process counts as busy and is neither
/// retired nor given to another task; drop it when the task has ended (and its process is idle or dead).
pub struct Granted {
    /// The process.
    pub incarnation: Incarnation,
    /// Every lease of the process.
    pub leases: Vec<GrantedLease>,
    /// How long the request waited.
    pub waited: Duration,
    /// Shared memory promised to the task, for [`Arena::create_reserved`]; what is left of it goes back with this.
    pub shared_memory: Reservation,
    release: OnRelease,
}

impl fmt::Debug for Granted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Granted")
            .field("incarnation", &self.incarnation)
            .field("leases", &self.leases)
            .field("waited", &self.waited)
            .field("shared_memory", &self.shared_memory.bytes())
            .finish_non_exhaustive()
    }
}

impl Granted {
    pub(super) fn new(
        incarnation: Incarnation,
        leases: Vec<GrantedLease>,
        waited: Duration,
        shared_memory: Reservation,
        release: OnRelease,
    ) -> Self {
        Self { incarnation, leases, waited, shared_memory, release }
    }

    /// Bytes granted for `purpose`; 0 without a lease of it.
    pub fn bytes(&self, purpose: Purpose) -> u64 {
        self.leases.iter().filter(|lease| lease.purpose == purpose).map(|lease| lease.bytes).sum()
    }

    /// Ends the claim. Dropping does the same with [`Afterwards::Keep`].
    pub fn finish(mut self, afterwards: Afterwards) {
        self.release.afterwards = afterwards;
    }
}

/// Releases a claim when dropped.
pub(super) struct OnRelease {
    pub(super) commands: mpsc::WeakUnboundedSender<Command>,
    pub(super) device: DeviceId,
    pub(super) id: RequestId,
    pub(super) afterwards: Afterwards,
}

impl Drop for OnRelease {
    fn drop(&mut self) {
        if let Some(commands) = self.commands.upgrade() {
            let (device, id, afterwards) = (self.device.clone(), self.id, self.afterwards);
            let _ = commands.send(Command::Release { device, id, afterwards });
        }
    }
}

/// Bytes that are on their way back. Dropping it changes nothing.
#[derive(Debug)]
pub struct Released {
    answer: oneshot::Receiver<u64>,
}

impl Released {
    /// Waits until nothing of what was asked for is charged any more: given back, or the process gone, and proven. The bytes
    /// whose release was proven meanwhile; 0 where there was nothing to give.
    pub async fn proven(self) -> u64 {
        self.answer.await.unwrap_or(0)
    }
}

/// The right to compute on a device, until dropped.
pub struct ComputeToken {
    pub(super) commands: mpsc::WeakUnboundedSender<Command>,
    pub(super) device: DeviceId,
    pub(super) id: RequestId,
}

impl fmt::Debug for ComputeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ComputeToken").field("device", &self.device).finish_non_exhaustive()
    }
}

impl ComputeToken {
    /// To be called at a step boundary: where a tenant waits that has had less of the device, it computes first. Returns when
    /// the caller may go on.
    ///
    /// # Errors
    /// [`Refusal::ShuttingDown`].
    pub async fn offer(&self) -> Result<(), Refusal> {
        let (reply, answer) = oneshot::channel();
        let commands = self.commands.upgrade().ok_or(Refusal::ShuttingDown)?;
        let _ = commands.send(Command::Offer { device: self.device.clone(), id: self.id, reply });
        drop(commands);
        answer.await.map_err(|_| Refusal::ShuttingDown)
    }
}

impl Drop for ComputeToken {
    fn drop(&mut self) {
        if let Some(commands) = self.commands.upgrade() {
            let _ = commands.send(Command::ComputeEnded { device: self.device.clone(), id: self.id });
        }
    }
}
