//! The owner task: one for all devices, so that every decision about bytes is made in one place, one after the other.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tokio::sync::{broadcast, mpsc, oneshot};
use tracing::debug;

use super::device::{DeviceConfig, ProbeError, Shown};
use super::handle::{Afterwards, ComputeToken, Granted, Holders};
use super::lease::{Incarnation, LeaseId, LeaseVector, Purpose, Refusal, RequestId};
use super::ledger::{Decision, Event, Ledger, Upcoming};
use super::view::DeviceSnapshot;
use crate::arena::Arena;
use crate::clock::{Clock, Moment};
use crate::ids::{DeviceId, JobId, Tenant};
use crate::journal::Journal;

/// What the handle asks of the owner task.
pub(super) enum Command {
    SetHolders(Arc<dyn Holders>),
    Request { id: RequestId, vector: LeaseVector, reply: oneshot::Sender<Result<Granted, Refusal>> },
    Withdraw { device: DeviceId, id: RequestId },
    Release { device: DeviceId, id: RequestId, afterwards: Afterwards },
    Compute { device: DeviceId, id: RequestId, job: JobId, reply: oneshot::Sender<Result<ComputeToken, Refusal>> },
    ComputeEnded { device: DeviceId, id: RequestId },
    Spawned { incarnation: Incarnation, pid: u32 },
    Attached { incarnation: Incarnation, reply: oneshot::Sender<()> },
    Lost { incarnation: Incarnation },
    Reaped { incarnation: Incarnation },
    Pulse { incarnation: Incarnation, device_bytes: u64, peak_bytes: u64 },
    Returned { incarnation: Incarnation, lease: LeaseId, bytes: u64 },
    Extend { incarnation: Incarnation, request_id: u64, purpose: Purpose, min: u64, want: u64 },
    Retire { incarnation: Incarnation, reply: oneshot::Sender<u64> },
    GiveBack { incarnation: Incarnation, weights: bool, reply: oneshot::Sender<u64> },
    Pin { incarnation: Incarnation, pinned: bool },
    BlockTime { incarnation: Incarnation, time: Duration },
    Watch { incarnation: Incarnation, reply: oneshot::Sender<u64> },
    Hold { device: DeviceId, time: Option<Duration>, reply: oneshot::Sender<u64> },
    Unhold { device: DeviceId },
    Available { device: DeviceId, reply: oneshot::Sender<Option<u64>> },
    Upcoming { stages: Vec<Upcoming> },
    ReadQueue { read: bool },
    Shares { parts: BTreeMap<Tenant, u32> },
    Offer { device: DeviceId, id: RequestId, reply: oneshot::Sender<()> },
    Snapshot { reply: oneshot::Sender<Vec<DeviceSnapshot>> },
}

/// A number that no other request of this process has.
pub(super) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(super) struct Device {
    pub(super) config: DeviceConfig,
    pub(super) ledger: Ledger,
    /// When it was read last, and what was wrong then.
    pub(super) read: Option<(Moment, Result<(), ProbeError>)>,
    /// Nobody shares it, as it said itself: there is nothing to read.
    pub(super) alone: bool,
}

/// Somebody who waits until what processes of a device give back is proven.
pub(super) struct Watch {
    pub(super) processes: BTreeSet<Incarnation>,
    /// Proven so far.
    pub(super) bytes: u64,
    reply: oneshot::Sender<u64>,
}

pub(super) struct Owner {
    pub(super) devices: BTreeMap<DeviceId, Device>,
    pub(super) arena: Arena,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) holders: Option<Arc<dyn Holders>>,
    pub(super) commands: mpsc::WeakUnboundedSender<Command>,
    pub(super) decisions: broadcast::Sender<Decision>,
    pub(super) journal: Journal,
    /// Whether the queue is read, and what it says.
    queue: (bool, Vec<Upcoming>),
    pub(super) watches: Vec<Watch>,
    pub(super) offers: HashMap<RequestId, oneshot::Sender<()>>,
    /// Where each process holds leases or is waited for.
    pub(super) places: HashMap<Incarnation, DeviceId>,
    pub(super) pids: HashMap<Incarnation, u32>,
    pub(super) granting: HashMap<RequestId, oneshot::Sender<Result<Granted, Refusal>>>,
    pub(super) computing: HashMap<RequestId, oneshot::Sender<Result<ComputeToken, Refusal>>>,
}

/// Runs until every handle is gone.
pub(super) async fn run(
    devices: Vec<DeviceConfig>,
    arena: Arena,
    clock: Arc<dyn Clock>,
    journal: Journal,
    mut inbox: mpsc::UnboundedReceiver<Command>,
    commands: mpsc::WeakUnboundedSender<Command>,
    decisions: broadcast::Sender<Decision>,
) {
    let with_ledger = |(number, config): (usize, DeviceConfig)| {
        // Ranges of 2^40 leases: disjoint for every device, and short in print for the first one.
        let first_lease = ((number as u64) << 40) + 1;
        let ledger = Ledger::new(config.id.clone(), config.budget, config.rules, first_lease);
        (config.id.clone(), Device { config, ledger, read: None, alone: false })
    };
    let mut owner = Owner {
        devices: devices.into_iter().enumerate().map(with_ledger).collect(),
        arena: arena.clone(),
        clock: clock.clone(),
        holders: None,
        commands,
        decisions,
        journal,
        queue: (true, Vec::new()),
        watches: Vec::new(),
        offers: HashMap::new(),
        places: HashMap::new(),
        pids: HashMap::new(),
        granting: HashMap::new(),
        computing: HashMap::new(),
    };
    loop {
        let wake = owner.devices.values().flat_map(|device| [device.ledger.next_wake(), device.next_reading()]);
        let wake = wake.flatten().min();
        tokio::select! {
            // Commands first: a return that arrived before its deadline is seen before the deadline.
            biased;
            command = inbox.recv() => match command {
                Some(command) => owner.handle(command),
                None => return,
            },
            () = arena.freed() => owner.tick(),
            () = sleep(&*clock, wake) => owner.tick(),
        }
    }
}

async fn sleep(clock: &dyn Clock, until: Option<Moment>) {
    match until {
        Some(moment) => clock.sleep_until(moment).await,
        None => pending().await,
    }
}

impl Owner {
    fn handle(&mut self, command: Command) {
        match command {
            Command::SetHolders(holders) => self.holders = Some(holders),
            Command::Request { id, vector, reply } => self.request(id, vector, reply),
            Command::Withdraw { device, id } => {
                self.granting.remove(&id);
                self.step(&device, Event::Withdraw { id });
            }
            Command::Release { device, id, afterwards } => self.step(&device, Event::Release { id, afterwards }),
            Command::Compute { device, id, job, reply } => {
                if self.devices.contains_key(&device) {
                    self.computing.insert(id, reply);
                    self.step(&device, Event::TokenRequest { id, job });
                } else {
                    let _ = reply.send(Err(self.no_device(device)));
                }
            }
            Command::ComputeEnded { device, id } => {
                self.computing.remove(&id);
                self.offers.remove(&id);
                self.step(&device, Event::TokenEnded { id });
            }
            Command::Spawned { incarnation, pid } => {
                self.pids.insert(incarnation, pid);
                if self.places.contains_key(&incarnation) {
                    self.step_of(incarnation, Event::Spawned { incarnation });
                } else if let Some(holders) = &self.holders {
                    // Its request was withdrawn while it was being started.
                    holders.kill(incarnation, super::lease::LeaseKill::NoLease);
                }
            }
            Command::Attached { incarnation, reply } => {
                self.step_of(incarnation, Event::Attached { incarnation });
                let _ = reply.send(());
            }
            Command::Lost { incarnation } => self.step_of(incarnation, Event::Lost { incarnation }),
            Command::Reaped { incarnation } => {
                self.step_of(incarnation, Event::Reaped { incarnation });
                // On a device where that proves nothing the pid is still needed to measure.
                if !self.places.contains_key(&incarnation) {
                    self.pids.remove(&incarnation);
                }
            }
            Command::Pulse { incarnation, device_bytes, peak_bytes } => {
                debug!(incarnation, device_bytes, peak_bytes, "pulse");
                // The device's own measure is believed before the process's word.
                let bytes = self.holds(incarnation, device_bytes);
                self.step_of(incarnation, Event::Pulse { incarnation, bytes });
            }
            Command::Returned { incarnation, lease, bytes } => {
                self.step_of(incarnation, Event::Returned { incarnation, lease, bytes });
            }
            Command::Extend { incarnation, request_id, purpose, min, want } => {
                self.step_of(incarnation, Event::Extend { incarnation, request_id, purpose, min, want });
            }
            Command::Retire { incarnation, reply } => {
                self.watch([incarnation].into(), reply);
                self.step_of(incarnation, Event::Retire { incarnation });
            }
            Command::GiveBack { incarnation, weights, reply } => {
                self.watch([incarnation].into(), reply);
                self.step_of(incarnation, Event::GiveBack { incarnation, weights });
            }
            Command::Pin { incarnation, pinned } => self.step_of(incarnation, Event::Pin { incarnation, pinned }),
            Command::BlockTime { incarnation, time } => {
                self.step_of(incarnation, Event::BlockTime { incarnation, time });
            }
            Command::Watch { incarnation, reply } => {
                self.watch([incarnation].into(), reply);
                self.answer_watches();
            }
            Command::Hold { device, time, reply } => {
                let there = self.devices.get(&device).map(|device| device.ledger.incarnations().collect());
                self.watch(there.unwrap_or_default(), reply);
                self.step(&device, Event::Hold { time });
            }
            Command::Unhold { device } => self.step(&device, Event::Unhold),
            Command::Available { device, reply } => {
                let now = self.clock.now();
                let free = |device: &Device| match device.ledger.held_for(now) {
                    Some(_) => 0,
                    None => device.ledger.available(),
                };
                let _ = reply.send(self.devices.get(&device).map(free));
            }
            Command::Upcoming { stages } => {
                self.queue.1 = stages;
                self.tell_upcoming();
            }
            Command::ReadQueue { read } => {
                self.queue.0 = read;
                self.tell_upcoming();
            }
            Command::Shares { parts } => {
                for device in self.devices.keys().cloned().collect::<Vec<_>>() {
                    self.step(&device, Event::Shares { weights: parts.clone() });
                }
            }
            Command::Offer { device, id, reply } => {
                self.offers.insert(id, reply);
                self.step(&device, Event::TokenOffered { id });
            }
            Command::Snapshot { reply } => {
                let _ = reply.send(self.snapshot());
            }
        }
    }

    /// Counts what is proven of these processes from now on. To be followed by a step, or by [`Self::answer_watches`].
    fn watch(&mut self, mut processes: BTreeSet<Incarnation>, reply: oneshot::Sender<u64>) {
        processes.retain(|incarnation| self.places.contains_key(incarnation));
        if processes.is_empty() {
            let _ = reply.send(0);
        } else {
            self.watches.push(Watch { processes, bytes: 0, reply });
        }
    }

    /// Answers those whose processes have given back all that was asked of them.
    fn answer_watches(&mut self) {
        let settled = |incarnation: &Incarnation| match self.places.get(incarnation) {
            Some(place) => self.devices.get(place).is_none_or(|device| device.ledger.settled(*incarnation)),
            None => true,
        };
        for watch in self.watches.extract_if(.., |watch| watch.processes.iter().all(settled)) {
            let _ = watch.reply.send(watch.bytes);
        }
    }

    fn tell_upcoming(&mut self) {
        let (read, stages) = self.queue.clone();
        for device in self.devices.keys().cloned().collect::<Vec<_>>() {
            let here = stages.iter().filter(|stage| read && stage.device == device).cloned().collect();
            self.step(&device, Event::Upcoming { stages: here });
        }
    }

    fn no_device(&self, device: DeviceId) -> Refusal {
        let known: Vec<&str> = self.devices.keys().map(DeviceId::as_str).collect();
        Refusal::NoDevice { device, known: known.join(", ") }
    }

    fn request(&mut self, id: RequestId, vector: LeaseVector, reply: oneshot::Sender<Result<Granted, Refusal>>) {
        let device = vector.device.clone();
        if !self.devices.contains_key(&device) {
            let _ = reply.send(Err(self.no_device(device)));
            return;
        }
        if let Err(why) = self.usable(&device) {
            let _ = reply.send(Err(Refusal::Unusable { device, holder: vector.holder, why }));
            return;
        }
        self.granting.insert(id, reply);
        self.places.insert(vector.incarnation, device.clone());
        self.step(&device, Event::Request { id, vector });
    }

    fn usable(&self, device: &DeviceId) -> Result<(), String> {
        self.devices.get(device).map_or(Ok(()), |device| device.config.probe.usable())
    }

    /// A step of the device where a process holds leases; nothing where it holds none.
    fn step_of(&mut self, incarnation: Incarnation, event: Event) {
        if let Some(device) = self.places.get(&incarnation).cloned() {
            self.step(&device, event);
        }
    }

    /// What a process holds: by the device's measure, and where that does not tell, by its own.
    fn holds(&self, incarnation: Incarnation, said: u64) -> u64 {
        let pid = self.pids.get(&incarnation);
        let device = self.places.get(&incarnation).and_then(|place| self.devices.get(place));
        let (Some(pid), Some(device)) = (pid, device) else { return said };
        match device.config.probe.process(*pid) {
            Ok(Shown::Bytes(bytes)) => bytes,
            Ok(Shown::Nothing | Shown::Hidden { .. }) | Err(_) => said,
        }
    }

    fn tick(&mut self) {
        for device in self.devices.keys().cloned().collect::<Vec<_>>() {
            self.step(&device, Event::Tick);
        }
    }

    /// One step of a device's ledger, its effects carried out, and the steps that those lead to.
    fn step(&mut self, device: &DeviceId, event: Event) {
        let mut events = std::collections::VecDeque::from(self.read(device, &event));
        events.push_back(event);
        while let Some(event) = events.pop_front() {
            let now = self.clock.now();
            let Some(Device { ledger, .. }) = self.devices.get_mut(device) else { return };
            // The account is held for the step alone, so that a grant takes its shared memory in the same moment.
            let effects = ledger.step(event, now, &mut self.arena.pool());
            for effect in effects {
                events.extend(self.carry_out(device, effect));
            }
        }
        let Some(Device { ledger, .. }) = self.devices.get(device) else { return };
        let (pids, places) = (&mut self.pids, &mut self.places);
        places.retain(|incarnation, place| {
            let known = place != device || ledger.knows(*incarnation);
            if !known {
                pids.remove(incarnation);
            }
            known
        });
        self.answer_watches();
    }

    /// A view with what the device shows now of others. One that is only observed has no ledger that follows them.
    fn as_it_stands(&self, device: &Device, view: DeviceSnapshot) -> DeviceSnapshot {
        let Ok(Some(reading)) = device.config.probe.reading(&self.pids_on(&device.config.id)) else { return view };
        let capacity = match device.config.probe.usable() {
            Ok(()) => view.capacity,
            Err(_) => reading.capacity(view.budget, 0),
        };
        DeviceSnapshot { foreign: reading.foreign().to_vec(), capacity, ..view }
    }

    /// Processes of ours that hold leases on a device.
    fn pids_on(&self, device: &DeviceId) -> Vec<u32> {
        let here = |incarnation: &Incarnation| self.places.get(incarnation) == Some(device);
        self.pids.iter().filter(|(incarnation, _)| here(incarnation)).map(|(_, pid)| *pid).collect()
    }

    fn snapshot(&self) -> Vec<DeviceSnapshot> {
        let now = self.clock.now();
        let view = |device: &Device| {
            let view = device.ledger.snapshot(&device.config.name, device.config.total, now);
            let held_until = device.ledger.held_for(now).map(|time| SystemTime::now() + time);
            self.as_it_stands(device, DeviceSnapshot { held_until, ..view })
        };
        let mut views: Vec<DeviceSnapshot> = self.devices.values().map(view).collect();
        // Where stages run comes first.
        views.sort_by_key(|view| (view.device != DeviceId::cpu(), view.device.clone()));
        views
    }
}
