//! The public server: the services, health and reflection, on every listener, until it is told to stop.

use std::time::Duration;

use prost::Message as _;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::api::{self, ControlService, GenerationService};
use crate::sockets::Listener;

/// Services whose health is shown; the empty name is the server as a whole.
const SERVICES: [&str; 3] = ["", "sd.v1.Generation", "sd.v1.Control"];

/// The running public server.
#[derive(Debug)]
pub struct PublicServer {
    health: HealthReporter,
    closing: CancellationToken,
    listeners: JoinSet<Result<(), tonic::transport::Error>>,
}

/// The descriptors that reflection shows: the public interface and what it uses; not the workers' link.
fn public_descriptors() -> Vec<u8> {
    let mut set = prost_types::FileDescriptorSet::decode(sd_proto::FILE_DESCRIPTOR_SET).unwrap_or_default();
    set.file.retain(|file| !file.package().starts_with("sd.worker"));
    set.encode_to_vec()
}

impl PublicServer {
    /// Serves on every listener.
    ///
    /// # Errors
    /// The descriptors are not consistent: a bug of the build.
    pub async fn start(
        generation: GenerationService,
        control: ControlService,
        listeners: Vec<Listener>,
    ) -> Result<Self, tonic_reflection::server::Error> {
        let (health, health_service) = tonic_health::server::health_reporter();
        for service in SERVICES {
            health.set_service_status(service, ServingStatus::Serving).await;
        }
        let descriptors = public_descriptors();
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(&descriptors)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let routes = Routes::new(health_service)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?)
            .add_service(api::generation(generation))
            .add_service(api::control(control));
        let closing = CancellationToken::new();
        let mut serving = JoinSet::new();
        for listener in listeners {
            let server = Server::builder()
                // A client that vanished without a word (its host lost power) is noticed; local ones are by their socket.
                .http2_keepalive_interval(Some(Duration::from_secs(30)))
                .http2_keepalive_timeout(Some(Duration::from_secs(20)))
                .add_routes(routes.clone());
            let signal = closing.clone().cancelled_owned();
            match listener {
                Listener::Unix(listener, _) => {
                    let incoming = UnixListenerStream::new(listener);
                    serving.spawn(server.serve_with_incoming_shutdown(incoming, signal));
                }
                Listener::Tcp(listener) => {
                    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
                    serving.spawn(server.serve_with_incoming_shutdown(incoming, signal));
                }
            }
        }
        Ok(Self { health, closing, listeners: serving })
    }

    /// Tells health checks that no more jobs are taken.
    pub async fn refuse(&self) {
        for service in SERVICES {
            self.health.set_service_status(service, ServingStatus::NotServing).await;
        }
    }

    /// Completes when a listener fails; never otherwise.
    pub async fn failed(&mut self) -> String {
        match self.listeners.join_next().await {
            Some(Ok(Err(error))) => error.to_string(),
            Some(Err(error)) => error.to_string(),
            Some(Ok(Ok(()))) | None => std::future::pending().await,
        }
    }

    /// Lets open calls end for at most `grace`, then drops them. A bidirectional stream that a client keeps open would
    /// hold the server for ever otherwise.
    pub async fn close(mut self, grace: Duration) {
        self.closing.cancel();
        let ended = async { while self.listeners.join_next().await.is_some() {} };
        if tokio::time::timeout(grace, ended).await.is_err() {
            tracing::debug!("closing connections that clients keep open");
        }
        self.listeners.shutdown().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reflection_shows_the_public_interface_and_not_the_link() {
        let set = prost_types::FileDescriptorSet::decode(public_descriptors().as_slice()).unwrap();
        let services: Vec<String> =
            set.file.iter().flat_map(|f| f.service.iter().map(|s| format!("{}.{}", f.package(), s.name()))).collect();
        assert!(services.contains(&"sd.v1.Generation".into()) && services.contains(&"sd.v1.Control".into()));
        assert!(!services.iter().any(|name| name.contains("Link")), "{services:?}");
    }
}
