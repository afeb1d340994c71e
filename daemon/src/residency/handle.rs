//! The handle to the residency, and what a request gives.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{broadcast, mpsc, oneshot};

use super::device::DeviceConfig;
use super::lease::{GrantedLease, Incarnation, LeaseId, LeaseKill, LeaseVector, Proof, Purpose, Refusal, RequestId};
use super::ledger::Decision;
use super::service::{self, Command};
use super::view::DeviceSnapshot;
use crate::arena::{Arena, Reservation};
use crate::clock::Clock;
use crate::ids::{DeviceId, JobId};

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
    /// Starts the owner task of `devices` on the current runtime. Grants of shared memory come out of `arena`.
    pub fn start(devices: Vec<DeviceConfig>, arena: Arena, clock: Arc<dyn Clock>) -> Self {
        let (commands, inbox) = mpsc::unbounded_channel();
        let (decisions, _) = broadcast::channel(1024);
        let weak = commands.downgrade();
        tokio::spawn(service::run(devices, arena, clock, inbox, weak, decisions.clone()));
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

    /// Retires a process as soon as it is idle.
    pub fn retire(&self, incarnation: Incarnation) {
        self.send(Command::Retire { incarnation });
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

impl Drop for ComputeToken {
    fn drop(&mut self) {
        if let Some(commands) = self.commands.upgrade() {
            let _ = commands.send(Command::ComputeEnded { device: self.device.clone(), id: self.id });
        }
    }
}
