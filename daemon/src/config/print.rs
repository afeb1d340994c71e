//! The effective configuration, as TOML that could be a configuration file, each value with its origin.

use std::fmt::Write as _;
use std::path::Path;

use super::memory::PRESET_KEYS;
use super::raw::KEYS;
use super::values::{ByteSize, Span};
use super::{Config, LogFormat, Origin};
use crate::ids::DeviceId;
use crate::residency::Budget;

/// One effective value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// Its key, with dots between tables.
    pub key: String,
    /// As TOML; `None` where it is not set or decided at the start.
    pub value: Option<String>,
    /// "default", "preset 24gb", a file with its line, a variable, a flag.
    pub source: String,
}

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
            "peaks_file" => path(&self.peaks_file),
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
            "devices.cpu.share" => self.shared.contains(&DeviceId::cpu()).to_string(),
            "deadlines.handshake" => span(workers.handshake),
            "deadlines.pulse_interval" => span(workers.pulse_interval),
            "deadlines.pulse" => span(workers.pulse),
            "deadlines.progress" => span(workers.progress),
            "deadlines.cancel" => span(workers.cancel),
            "deadlines.retire" => span(workers.retire),
            "deadlines.inspect" => span(workers.inspect),
            "deadlines.drain" => span(self.drain),
            "deadlines.stop" => span(self.stop),
            "deadlines.keep_alive" => span(self.keep_alive),
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
            "cache.conditioning" => quoted(ByteSize(self.cache.bytes)),
            "cache.share_conditioning" => self.cache.shared.to_string(),
            "log.filter" => quoted(&self.log_filter),
            "log.format" => quoted(match self.log_format {
                LogFormat::Text => "text",
                LogFormat::Json => "json",
            }),
            key => return self.memory.settings().effective.value(key.strip_prefix("memory.")?),
        })
    }

    fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    /// Where a key's effective value comes from, for people.
    fn source(&self, key: &str) -> String {
        let filled = key.strip_prefix("memory.").is_some_and(|key| PRESET_KEYS.contains(&key));
        match self.origins.get(key) {
            Some(origin) => origin.to_string(),
            None if filled => format!("preset {}", self.memory.settings().preset),
            None => Origin::Default.to_string(),
        }
    }

    /// Every key with its effective value as TOML and where that comes from; those that are decided at the start or not set
    /// have no value. Models and their memory follow.
    pub fn values(&self) -> Vec<Value> {
        let fixed = KEYS.iter().filter(|key| key.name != "models");
        let mut values: Vec<Value> = fixed
            .map(|key| Value { key: key.name.into(), value: self.value(key.name), source: self.source(key.name) })
            .collect();
        values.extend(self.models.models.iter().map(|(name, folder)| {
            let key = format!("models.{name}");
            Value { value: Some(path(folder)), source: self.origin(&key).to_string(), key }
        }));
        for (name, written) in &self.memory.models {
            let keys = KEYS.iter().filter_map(|key| key.name.strip_prefix("memory."));
            values.extend(keys.filter_map(|key| {
                let value = written.value(key)?;
                let key = format!("model_memory.{name}.{key}");
                Some(Value { value: Some(value), source: self.origin(&key).to_string(), key })
            }));
        }
        values
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
                // What a preset fills is shown and not written: a file that wrote it would make it a user's.
                Some(value) if self.origins.contains_key(key.name) || table != "memory" => {
                    writeln!(text, "# {}\n{name} = {value} # {}", key.help, self.origin(key.name))
                }
                Some(value) => writeln!(text, "# {}\n# {name} = {value} # {}", key.help, self.source(key.name)),
                None if table == "memory" => writeln!(text, "# {}\n# {name} = (not set)", key.help),
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
        for (name, written) in &self.memory.models {
            let _ = write!(text, "\n[model_memory.{}]\n", quoted(name));
            for key in KEYS.iter().filter_map(|key| key.name.strip_prefix("memory.")) {
                if let Some(value) = written.value(key) {
                    let _ = writeln!(text, "{key} = {value} # {}", self.origin(&format!("model_memory.{name}.{key}")));
                }
            }
        }
        text
    }
}
