//! Who calls, and what that allows.

use tonic::Extensions;
use tonic::transport::server::UdsConnectInfo;

use crate::ids::Tenant;
use crate::jobs::admission::Asker;
use crate::jobs::viewer::{Viewer, tcp_tenant, tenant_of_uid};

/// The peer of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// A process of this user, over the Unix socket.
    User {
        /// The user, as the kernel says.
        uid: u32,
        /// The daemon's own user.
        own: bool,
    },
    /// Whoever came over TCP.
    Tcp,
}

impl Caller {
    /// The caller of a request with these extensions. Credentials are the kernel's, taken when the connection was made.
    pub fn of(extensions: &Extensions) -> Self {
        let uid = extensions.get::<UdsConnectInfo>().and_then(|info| info.peer_cred).map(|cred| cred.uid());
        match uid {
            Some(uid) => Self::User { uid, own: uid == nix::unistd::geteuid().as_raw() },
            None => Self::Tcp,
        }
    }

    /// Whose jobs it submits.
    pub fn tenant(self) -> Tenant {
        match self {
            Self::User { uid, .. } => tenant_of_uid(uid),
            Self::Tcp => tcp_tenant(),
        }
    }

    /// Whether it may act on everybody's jobs and on the daemon itself: the daemon's own user and root.
    pub fn is_operator(self) -> bool {
        match self {
            Self::User { uid, own } => own || uid == 0,
            Self::Tcp => false,
        }
    }

    /// Which jobs exist for it.
    pub fn viewer(self) -> Viewer {
        if self.is_operator() { Viewer::Operator(self.tenant()) } else { Viewer::Tenant(self.tenant()) }
    }

    /// What admission cares about.
    pub fn asker(self) -> Asker {
        let may_name_paths = match self {
            Self::User { own, .. } => own,
            Self::Tcp => false,
        };
        Asker { may_name_paths }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_own_user_names_paths_and_only_it_and_root_see_all() {
        let own = Caller::User { uid: 1000, own: true };
        let root = Caller::User { uid: 0, own: false };
        let other = Caller::User { uid: 1001, own: false };
        assert!(own.asker().may_name_paths && own.is_operator());
        assert!(!root.asker().may_name_paths && root.is_operator());
        for caller in [other, Caller::Tcp] {
            assert!(!caller.asker().may_name_paths && !caller.is_operator());
            assert!(!caller.viewer().sees(&own.tenant()) && caller.viewer().sees(&caller.tenant()));
        }
        assert!(own.viewer().sees(&other.tenant()));
        assert_eq!(Caller::of(&Extensions::new()), Caller::Tcp, "without credentials nothing is allowed");
    }
}
