//! Where a daemon is looked for, in order.

use std::fmt;
use std::path::{Path, PathBuf};

use sd_proto::endpoint::{Endpoint, EndpointError, system_socket, user_socket};

use crate::Trust;

/// Environment variable that names the daemon to use.
const ENDPOINT_VARIABLE: &str = "SDCTL_ENDPOINT";

/// How a daemon was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// Named on the command line or by the program.
    Named,
    /// Named by `SDCTL_ENDPOINT`.
    Environment,
    /// The system's socket.
    System,
    /// The user's socket.
    User,
    /// The daemon that holds the device.
    Holder,
    /// Started for this session.
    Private,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Named => "--endpoint",
            Self::Environment => ENDPOINT_VARIABLE,
            Self::System => "system socket",
            Self::User => "user socket",
            Self::Holder => "holder of the device",
            Self::Private => "private daemon",
        })
    }
}

/// One place to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// How we know of it.
    pub source: Source,
    /// Where it is.
    pub endpoint: Endpoint,
    /// Whose socket it may be.
    pub trust: Trust,
}

/// Why no place can be determined.
#[derive(Debug, thiserror::Error)]
pub enum PlacesError {
    /// `SDCTL_ENDPOINT` is not an endpoint.
    #[error("SDCTL_ENDPOINT: {0}")]
    Variable(#[from] EndpointError),
}

/// The places where a daemon may be.
#[derive(Debug, Clone)]
pub struct Places {
    /// An endpoint that the user named: the only place then.
    pub named: Option<Candidate>,
    /// Sockets to try otherwise, in order.
    pub sockets: Vec<Candidate>,
    /// Folder of device locks; absent: the host's ([`sd_proto::instance::default_lock_dir`]).
    pub lock_dir: Option<PathBuf>,
}

impl Places {
    /// `named`, then `SDCTL_ENDPOINT`, then the system's socket, then the user's.
    ///
    /// # Errors
    /// The variable does not hold an endpoint.
    pub fn from_environment(named: Option<Endpoint>) -> Result<Self, PlacesError> {
        let variable = std::env::var(ENDPOINT_VARIABLE).ok().filter(|text| !text.is_empty());
        Self::resolve(named, variable.as_deref(), &system_socket(), &user_socket())
    }

    /// The pure form of [`Places::from_environment`].
    ///
    /// # Errors
    /// `variable` is not an endpoint.
    pub fn resolve(
        named: Option<Endpoint>,
        variable: Option<&str>,
        system: &Path,
        user: &Path,
    ) -> Result<Self, PlacesError> {
        let by_hand = |source, endpoint| Candidate { source, endpoint, trust: Trust::Named };
        let named = match (named, variable) {
            (Some(endpoint), _) => Some(by_hand(Source::Named, endpoint)),
            (None, Some(text)) => Some(by_hand(Source::Environment, text.parse()?)),
            (None, None) => None,
        };
        let sockets = vec![
            // Its folder belongs to the system, so whoever serves there was let by root.
            Candidate { source: Source::System, endpoint: Endpoint::Unix(system.into()), trust: Trust::Named },
            // May lie in a folder where anybody can be first.
            Candidate { source: Source::User, endpoint: Endpoint::Unix(user.into()), trust: Trust::OwnOrRoot },
        ];
        Ok(Self { named, sockets, lock_dir: None })
    }

    /// What to try, in order.
    pub fn candidates(&self) -> &[Candidate] {
        match &self.named {
            Some(named) => std::slice::from_ref(named),
            None => &self.sockets,
        }
    }

    /// The folder of device and instance locks.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn lock_dir(&self) -> std::io::Result<PathBuf> {
        match &self.lock_dir {
            Some(dir) => Ok(dir.clone()),
            None => sd_proto::instance::default_lock_dir(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(named: Option<&str>, variable: Option<&str>) -> Places {
        let named = named.map(|text| text.parse().unwrap());
        Places::resolve(named, variable, Path::new("/s.sock"), Path::new("/u.sock")).unwrap()
    }

    #[test]
    fn the_flag_beats_the_variable_and_either_beats_the_sockets() {
        let sources = |places: &Places| places.candidates().iter().map(|c| c.source).collect::<Vec<_>>();
        let places = resolve(Some("a:1"), Some("b:2"));
        assert_eq!(sources(&places), [Source::Named]);
        assert_eq!(places.candidates()[0].endpoint.to_string(), "a:1");
        let places = resolve(None, Some("b:2"));
        assert_eq!(sources(&places), [Source::Environment]);
        assert_eq!(places.candidates()[0].endpoint.to_string(), "b:2");
        let places = resolve(None, None);
        assert_eq!(sources(&places), [Source::System, Source::User]);
        assert_eq!(places.candidates()[1].trust, Trust::OwnOrRoot);
    }

    #[test]
    fn a_bad_variable_is_named() {
        let error = Places::resolve(None, Some("nonsense"), Path::new("/s"), Path::new("/u")).unwrap_err();
        assert!(error.to_string().starts_with("SDCTL_ENDPOINT: \"nonsense\" is not an endpoint"), "{error}");
    }
}
