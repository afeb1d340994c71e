//! Finds a daemon, joins the one that holds the device, or starts a private one.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sd_proto::endpoint::Endpoint;
use sd_proto::instance::{DeviceLock, Holder};

use crate::places::{Candidate, Places, Source};
use crate::private::{Closed, PrivateDaemon, StartError};
use crate::{CallError, Client, ConnectError, Trust};

/// How long a daemon may take to say that it is there.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// How often a held device is looked at again.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// A device that is held this long is worth a word to the user.
const QUIET_WAIT: Duration = Duration::from_secs(1);

/// What may be done where no daemon answers.
#[derive(Debug, Clone)]
pub struct StartPolicy {
    /// The `sdd` to start; absent: `SDCTL_SDD`, the one beside this program, or the first on the PATH.
    pub program: Option<PathBuf>,
    /// Sends the private daemon's log to our stderr.
    pub verbose: bool,
    /// How long to wait for a device that another daemon holds.
    pub patience: Duration,
}

impl Default for StartPolicy {
    fn default() -> Self {
        Self { program: None, verbose: false, patience: Duration::from_secs(600) }
    }
}

/// Something the user may want to know while a daemon is looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A place was passed over, for a reason that deserves a word.
    Skipped(String),
    /// A private daemon is being started.
    Starting,
    /// The device is held by a daemon that cannot be joined; waiting for its end.
    Waiting(String),
    /// Joined the daemon that holds the device.
    Joined(Endpoint),
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The named daemon cannot be reached.
    #[error("{error}{}", match found {
        Source::Environment => " (named by SDCTL_ENDPOINT)",
        Source::Named | Source::System | Source::User | Source::Holder | Source::Private => "",
    })]
    Connect {
        /// Who named it.
        found: Source,
        /// What happened.
        error: ConnectError,
    },
    /// It is connected and does not answer as it should.
    #[error(transparent)]
    Call(#[from] CallError),
    /// No daemon runs, and none was to be started.
    #[error("no daemon runs (looked at {}): start one with `sdd`, or name one with --endpoint", tried.join(", "))]
    NoDaemon {
        /// Where it was looked for.
        tried: Vec<String>,
    },
    /// No private daemon could be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The device stayed held.
    #[error("{holder}; gave up after {} s: end that daemon, or use it with --endpoint", after.as_secs())]
    Held {
        /// Who holds it.
        holder: String,
        /// How long we waited.
        after: Duration,
    },
    /// The folder of locks cannot be used.
    #[error("cannot use the folder for locks: {0}")]
    Locks(#[from] std::io::Error),
}

/// A daemon to talk to for a while.
#[derive(Debug)]
pub struct Session {
    client: Client,
    source: Source,
    daemon: Option<PrivateDaemon>,
}

impl Session {
    /// Finds a running daemon; `None` where there is none.
    ///
    /// # Errors
    /// A named daemon cannot be reached, or one that was found does not answer.
    pub async fn find(places: &Places, notify: &mut dyn FnMut(Notice)) -> Result<Option<Self>, OpenError> {
        if let Some(session) = Self::try_candidates(places, notify).await? {
            return Ok(Some(session));
        }
        for (_, holder) in holders(&places.lock_dir()?)? {
            if let Some(client) = join(&holder).await {
                return Ok(Some(Self { client, source: Source::Holder, daemon: None }));
            }
        }
        Ok(None)
    }

    /// As [`Session::find`], for callers that need a daemon that runs already.
    ///
    /// # Errors
    /// [`OpenError::NoDaemon`] besides those of [`Session::find`].
    pub async fn existing(places: &Places, notify: &mut dyn FnMut(Notice)) -> Result<Self, OpenError> {
        let tried = || places.candidates().iter().map(|c| c.endpoint.to_string()).collect();
        Self::find(places, notify).await?.ok_or_else(|| OpenError::NoDaemon { tried: tried() })
    }

    /// Finds a daemon or starts a private one; where another daemon holds the device, joins it or waits for its end.
    /// Cancel-safe: dropping the future leaves nothing behind.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub async fn open(
        places: &Places,
        policy: &StartPolicy,
        notify: &mut dyn FnMut(Notice),
    ) -> Result<Self, OpenError> {
        let begun = Instant::now();
        let mut told = false;
        loop {
            if let Some(session) = Self::try_candidates(places, notify).await? {
                return Ok(session);
            }
            notify(Notice::Starting);
            let started =
                PrivateDaemon::start(policy.program.as_deref(), places.lock_dir.clone(), policy.verbose).await;
            let message = match started {
                Ok(daemon) => return Self::of_private(daemon).await,
                Err(StartError::Held { message }) => message,
                Err(error) => return Err(error.into()),
            };
            if let Some(session) = Self::join_or_wait(places, policy, notify, &message, begun, &mut told).await? {
                return Ok(session);
            }
        }
    }

    async fn of_private(daemon: PrivateDaemon) -> Result<Self, OpenError> {
        let connected = Client::connect(daemon.endpoint()).await;
        let client = connected.map_err(|error| OpenError::Connect { found: Source::Private, error })?;
        Ok(Self { client, source: Source::Private, daemon: Some(daemon) })
    }

    /// Joins the device's holder; `None` once the device is free, or another place may answer.
    async fn join_or_wait(
        places: &Places,
        policy: &StartPolicy,
        notify: &mut dyn FnMut(Notice),
        message: &str,
        begun: Instant,
        told: &mut bool,
    ) -> Result<Option<Self>, OpenError> {
        let lock_dir = places.lock_dir()?;
        loop {
            let held = holders(&lock_dir)?;
            for (_, holder) in &held {
                if let Some(client) = join(holder).await {
                    notify(Notice::Joined(client.endpoint().clone()));
                    return Ok(Some(Self { client, source: Source::Holder, daemon: None }));
                }
            }
            if begun.elapsed() >= policy.patience {
                return Err(OpenError::Held { holder: message.to_owned(), after: policy.patience });
            }
            if !*told && begun.elapsed() >= QUIET_WAIT {
                *told = true;
                notify(Notice::Waiting(message.to_owned()));
            }
            // Nobody tells us when an flock of another user ends, and its daemon may begin to listen meanwhile.
            tokio::time::sleep(RETRY_INTERVAL).await;
            if held.is_empty() {
                return Ok(None);
            }
        }
    }

    async fn try_candidates(places: &Places, notify: &mut dyn FnMut(Notice)) -> Result<Option<Self>, OpenError> {
        // What a killed daemon left is gone by the next start of any program, this one included. Not being able to look
        // there is no reason not to find a living daemon.
        if let Ok(lock_dir) = places.lock_dir() {
            let _ = sd_proto::instance::sweep(&lock_dir);
        }
        for Candidate { source, endpoint, trust } in places.candidates() {
            let source = *source;
            let by_hand = matches!(source, Source::Named | Source::Environment);
            let client = match Client::connect_trusting(endpoint, *trust).await {
                Ok(client) => client,
                Err(error) if by_hand => return Err(OpenError::Connect { found: source, error }),
                Err(ConnectError::Absent { .. }) => continue,
                Err(error @ (ConnectError::Untrusted { .. } | ConnectError::Forbidden { .. })) => {
                    notify(Notice::Skipped(error.to_string()));
                    continue;
                }
                Err(error @ (ConnectError::Silent { .. } | ConnectError::Foreign { .. })) => {
                    return Err(OpenError::Connect { found: source, error });
                }
            };
            match client.status_within(HELLO_LIMIT).await {
                // It takes no new jobs and is about to go; a named one says so itself.
                Ok(status) if status.draining && !by_hand => continue,
                Ok(_) => return Ok(Some(Self { client, source, daemon: None })),
                Err(error) if error.daemon_is_gone() && !by_hand => continue,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    /// The connection.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// How the daemon was found.
    pub fn source(&self) -> Source {
        self.source
    }

    /// Whether the daemon was found by us rather than named, so that another one is as good.
    pub fn replaceable(&self) -> bool {
        match self.source {
            Source::Named | Source::Environment | Source::Private => false,
            Source::System | Source::User | Source::Holder => true,
        }
    }

    /// What a private daemon that failed us has to say: how it ended, and its last lines.
    pub async fn post_mortem(&mut self) -> Option<(Option<String>, Vec<String>)> {
        let daemon = self.daemon.as_mut()?;
        let ended = daemon.ended().await;
        Some((ended, daemon.log_tail()))
    }

    /// Ends a private daemon in bounded time and removes what it left; other daemons are left alone.
    pub async fn close(self) -> Option<Closed> {
        match self.daemon {
            Some(daemon) => Some(daemon.close(Some(&self.client)).await),
            None => None,
        }
    }
}

/// Every device of the host that a daemon holds now, and who.
fn holders(lock_dir: &Path) -> std::io::Result<Vec<(String, Holder)>> {
    let mut held = Vec::new();
    for entry in std::fs::read_dir(lock_dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Some(device) = name.strip_prefix("device-").and_then(|n| n.strip_suffix(".lock")) else { continue };
        let holders = DeviceLock::holders(lock_dir, device)?;
        held.extend(holders.into_iter().map(|holder| (device.to_owned(), holder)));
    }
    Ok(held)
}

/// Connects to a holder of this user that takes jobs. The lock file is writable for all, so a Unix socket must show by
/// its owner that it is ours; of a TCP address only the process tells.
async fn join(holder: &Holder) -> Option<Client> {
    let own = nix::unistd::getuid().as_raw();
    let endpoint: Endpoint = holder.endpoint.parse().ok()?;
    if let Endpoint::Tcp { .. } = endpoint {
        use std::os::unix::fs::MetadataExt as _;
        let owner = std::fs::metadata(format!("/proc/{}", holder.pid)).ok()?.uid();
        if holder.uid != own || owner != own {
            return None;
        }
    }
    let client = Client::connect_trusting(&endpoint, Trust::OwnOrRoot).await.ok()?;
    let status = client.status_within(HELLO_LIMIT).await.ok()?;
    (!status.draining && status.pid == holder.pid).then_some(client)
}
