//! The effective configuration, as TOML that could be a configuration file, each value with its origin.

use std::fmt::Write as _;
use std::path::Path;

use super::raw::KEYS;
use super::values::{ByteSize, Span};
use super::{Config, LogFormat, Origin};
use crate::ids::DeviceId;
use crate::residency::Budget;

fn quoted(text: impl std::fmt::Display) -> String {
    toml::Value::String(text.to_string()).to_string()
}

fn path(path: &Path) -> String {
    quoted(path.display())
}

impl Config {
    /// The value of a key of [`KEYS`] as TOML; `None` where it is decided when the daemon starts, or not set.
    fn value(&self, key: &str) -> Option<String> {
        let (workers, jobs) = (&self.workers, &self.jobs);
        let span = |span| quoted(Span(span));
        let bytes = |bytes: usize| quoted(ByteSize(bytes as u64));
        Some(match key {
            "listen" => format!("[{}]", self.listen.iter().map(quoted).collect::<Vec<_>>().join(", ")),
            "insecure_listen" => self.insecure_listen.to_string(),
            "socket_mode" => quoted(format_args!("{:04o}", self.socket_mode)),
            "runtime_dir" => path(&self.runtime_dir),
            "cache_dir" => path(&self.models.cache_dir),
            "lock_dir" => path(self.lock_dir.as_ref()?),
            "state_dir" => path(self.state_dir.as_ref()?),
            "durable" => self.state_dir.is_some().to_string(),
            "models_dir" => path(self.models.folder.as_ref()?),
            "default_model" => quoted(self.models.default.as_deref().unwrap_or(crate::models::registry::EMBEDDED)),
            "threads" => self.threads.to_string(),
            "worker_binary" => path(&self.worker_binary),
            "devices.cpu.budget" => match self.devices.get(&DeviceId::cpu()) {
                Some(Budget::Bytes(bytes)) => quoted(ByteSize(*bytes)),
                Some(Budget::Auto) | None => return None,
            },
            "deadlines.handshake" => span(workers.handshake),
            "deadlines.pulse_interval" => span(workers.pulse_interval),
            "deadlines.pulse" => span(workers.pulse),
            "deadlines.progress" => span(workers.progress),
            "deadlines.cancel" => span(workers.cancel),
            "deadlines.retire" => span(workers.retire),
            "deadlines.inspect" => span(workers.inspect),
            "deadlines.drain" => span(self.drain),
            "deadlines.stop" => span(self.stop),
            "limits.prompt_bytes" => bytes(jobs.prompt_bytes),
            "limits.steps" => jobs.steps.to_string(),
            "limits.count" => jobs.count.to_string(),
            "limits.edge" => jobs.edge.to_string(),
            "limits.image_file_bytes" => bytes(jobs.image_file_bytes),
            "limits.queued_jobs" => jobs.queued_jobs.to_string(),
            "limits.queued_jobs_per_tenant" => jobs.queued_jobs_per_tenant.to_string(),
            "limits.running_jobs" => jobs.running_jobs.to_string(),
            "limits.ended_jobs" => jobs.ended_jobs.to_string(),
            "limits.ended_bytes" => bytes(jobs.ended_bytes),
            "limits.shared_memory" => quoted(ByteSize(self.shared_memory?)),
            "log.filter" => quoted(&self.log_filter),
            "log.format" => quoted(match self.log_format {
                LogFormat::Text => "text",
                LogFormat::Json => "json",
            }),
            _ => return None,
        })
    }

    fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    /// Everything, as a TOML document with a comment on each value: where it was set, and what it does.
    pub fn print(&self) -> String {
        let mut text = String::new();
        let mut table = "";
        for key in KEYS.iter().filter(|key| key.name != "models") {
            let (new_table, name) = key.name.rsplit_once('.').unwrap_or(("", key.name));
            if new_table != table {
                table = new_table;
                let _ = write!(text, "\n[{table}]\n");
            }
            let _ = match self.value(key.name) {
                Some(value) => {
                    writeln!(text, "# {}\n{name} = {value} # {}", key.help, self.origin(key.name))
                }
                None => writeln!(text, "# {}\n# {name} = (decided at start)", key.help),
            };
        }
        if !self.models.models.is_empty() {
            text.push_str("\n[models]\n");
            for (name, folder) in &self.models.models {
                let origin = self.origin(&format!("models.{name}"));
                let _ = writeln!(text, "{} = {} # {origin}", quoted(name), path(folder));
            }
        }
        text
    }
}
