//! File, environment and flags as layers of one table, each value with its origin.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::ConfigError;
use super::memory::{PRESET_KEYS, RawMemory};
use super::presets::Preset;
use super::raw::{KEYS, Key, Kind, Raw};

/// A file for `--memory`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryFile {
    memory: Option<RawMemory>,
    #[serde(default, rename = "model_memory")]
    _models: BTreeMap<String, RawMemory>,
}

/// Where a value was set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nowhere.
    Default,
    /// In a file.
    File {
        /// Its path.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
    },
    /// By a variable of the environment.
    Environment(String),
    /// On the command line.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => f.write_str(name),
            Self::Flag(name) => f.write_str(name),
        }
    }
}

/// The layers so far, later ones over earlier ones.
#[derive(Debug, Default)]
pub struct Layers {
    table: Table,
    origins: BTreeMap<String, Origin>,
}

impl Layers {
    /// Lays a file over what is there. Relative paths in it are meant from the file's own folder.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, has an unknown key or a value of another type: with file, line and key.
    pub fn file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })?;
        let wrong = |error: toml::de::Error| {
            let line = error.span().map_or(1, |span| line_of(&text, span.start));
            // The parser names types, not the key that has the wrong one: the line shows it.
            let shown = text.lines().nth(line - 1).unwrap_or_default().trim();
            let problem = format!("{}, in `{shown}`", error.message().trim_end());
            ConfigError::File { path: path.to_path_buf(), line, problem }
        };
        toml::from_str::<Raw>(&text).map_err(wrong)?;
        let mut table: Table = toml::from_str(&text).map_err(wrong)?;
        if let Some(folder) = path.parent() {
            anchor(&mut table, folder);
        }
        let spans = DeTable::parse(&text).map_err(wrong)?;
        each_leaf(spans.get_ref(), "", &mut |key, span| {
            let origin = Origin::File { path: path.to_path_buf(), line: line_of(&text, span) };
            self.origins.insert(key, origin);
        });
        merge(&mut self.table, table);
        Ok(())
    }

    /// Lays a file with a `[memory]` table over what is there: what it does not write comes from the preset that it names, else
    /// from 24gb, and never from a table below it. `[model_memory.NAME]` may stand in it too, and nothing else.
    ///
    /// # Errors
    /// As [`Layers::file`]; also where the table is not there.
    pub fn memory_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })?;
        let wrong = |line: usize, problem: String| ConfigError::File { path: path.to_path_buf(), line, problem };
        let of_toml = |error: toml::de::Error| {
            let line = error.span().map_or(1, |span| line_of(&text, span.start));
            let shown = text.lines().nth(line - 1).unwrap_or_default().trim();
            wrong(line, format!("{}, in `{shown}`", error.message().trim_end()))
        };
        let file: MemoryFile = toml::from_str(&text).map_err(of_toml)?;
        let Some(memory) = file.memory else {
            return Err(wrong(
                1,
                "there is no table [memory]: a file for --memory must have one, if only with a preset".into(),
            ));
        };
        let preset = memory.preset.unwrap_or(Preset::Gb24);
        if let Some(Value::Table(below)) = self.table.get_mut("memory") {
            below.retain(|key, _| !PRESET_KEYS.contains(&key));
        }
        for key in PRESET_KEYS {
            self.origins.remove(&format!("memory.{key}"));
        }
        self.file(path)?;
        if memory.preset.is_none() {
            let origin = Origin::File { path: path.to_path_buf(), line: 1 };
            self.set_by_name("memory.preset", preset.name(), origin)?;
        }
        Ok(())
    }

    /// Lays `SDD_…` variables over what is there. Unknown ones are not ours to refuse; they are returned.
    ///
    /// # Errors
    /// A value of another type than its key has.
    pub fn environment(
        &mut self,
        variables: impl Iterator<Item = (String, String)>,
    ) -> Result<Vec<String>, ConfigError> {
        let mut unknown = Vec::new();
        for (name, text) in variables {
            let Some(rest) = name.strip_prefix("SDD_") else { continue };
            let known =
                KEYS.iter().find(|key| key.name.replace('.', "_").eq_ignore_ascii_case(rest) && key.name != "models");
            match known {
                Some(_) if text.is_empty() => {}
                Some(key) => self.set(key, &text, Origin::Environment(name))?,
                None if rest == "CONFIG" => {}
                None => unknown.push(name),
            }
        }
        Ok(unknown)
    }

    /// Sets one key by name.
    ///
    /// # Errors
    /// No such key, or a value of another type.
    pub fn set_by_name(&mut self, name: &str, text: &str, origin: Origin) -> Result<(), ConfigError> {
        if let Some(model) = name.strip_prefix("models.") {
            return self.insert(name, &["models", model], Value::String(text.into()), origin);
        }
        if let Some((model, key)) = name.strip_prefix("model_memory.").and_then(|rest| rest.rsplit_once('.'))
            && let Some(known) = KEYS.iter().find(|known| known.name.strip_prefix("memory.") == Some(key))
        {
            let value = Self::read(known, text, &origin)?;
            return self.insert(name, &["model_memory", model, key], value, origin);
        }
        match KEYS.iter().find(|key| key.name == name && name != "models") {
            Some(key) => self.set(key, text, origin),
            None => Err(ConfigError::Value {
                key: name.into(),
                origin,
                problem: "there is no such key: `sdd --print-config` lists all".into(),
            }),
        }
    }

    fn set(&mut self, key: &Key, text: &str, origin: Origin) -> Result<(), ConfigError> {
        let value = Self::read(key, text, &origin)?;
        self.insert(key.name, &key.name.split('.').collect::<Vec<_>>(), value, origin)
    }

    /// A value from its text outside a file.
    fn read(key: &Key, text: &str, origin: &Origin) -> Result<Value, ConfigError> {
        let wrong = |problem: String| ConfigError::Value { key: key.name.into(), origin: origin.clone(), problem };
        Ok(match key.kind {
            Kind::Text => Value::String(text.into()),
            Kind::List => Value::Array(text.split(',').map(|item| Value::String(item.trim().into())).collect()),
            Kind::Number => {
                Value::Integer(text.trim().parse().map_err(|_| wrong(format!("{text:?} is not a whole number")))?)
            }
            Kind::Switch => match text.trim() {
                "true" | "1" | "yes" => Value::Boolean(true),
                "false" | "0" | "no" => Value::Boolean(false),
                _ => return Err(wrong(format!("{text:?} is neither true nor false"))),
            },
            Kind::Decimal => Value::Float(text.trim().parse().map_err(|_| wrong(format!("{text:?} is not a number")))?),
        })
    }

    fn insert(&mut self, key: &str, path: &[&str], value: Value, origin: Origin) -> Result<(), ConfigError> {
        let nested =
            path.iter().rev().fold(value, |value, part| Value::Table(Table::from_iter([((*part).to_owned(), value)])));
        let Value::Table(layer) = nested else { return Ok(()) };
        // By itself first, so that a wrong value is blamed on this origin.
        layer.clone().try_into::<Raw>().map_err(|error| ConfigError::Value {
            key: key.into(),
            origin: origin.clone(),
            problem: error.message().to_owned(),
        })?;
        merge(&mut self.table, layer);
        self.origins.insert(key.to_owned(), origin);
        Ok(())
    }

    /// Everything together.
    ///
    /// # Errors
    /// None of a layer's own: each was checked when it was laid.
    pub fn finish(self) -> Result<(Raw, BTreeMap<String, Origin>), ConfigError> {
        let raw = self.table.try_into::<Raw>().map_err(|error| ConfigError::Value {
            key: "(merged)".into(),
            origin: Origin::Default,
            problem: error.message().to_owned(),
        })?;
        Ok((raw, self.origins))
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count()
}

fn each_leaf(table: &DeTable<'_>, prefix: &str, found: &mut impl FnMut(String, usize)) {
    for (key, value) in table {
        let name = key.get_ref();
        let path = if prefix.is_empty() { name.to_string() } else { format!("{prefix}.{name}") };
        match Spanned::get_ref(value) {
            DeValue::Table(inner) => each_leaf(inner, &path, found),
            DeValue::String(_)
            | DeValue::Integer(_)
            | DeValue::Float(_)
            | DeValue::Boolean(_)
            | DeValue::Datetime(_)
            | DeValue::Array(_) => found(path, key.span().start),
        }
    }
}

fn merge(under: &mut Table, over: Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(Value::Table(inner)), Value::Table(value)) => merge(inner, value),
            (_, value) => {
                under.insert(key, value);
            }
        }
    }
}

/// Makes a file's relative paths absolute from its folder.
fn anchor(table: &mut Table, folder: &Path) {
    let fix = |value: &mut Value| {
        if let Value::String(text) = value
            && Path::new(text.as_str()).is_relative()
            && !text.is_empty()
        {
            *text = folder.join(text.as_str()).to_string_lossy().into_owned();
        }
    };
    for key in ["runtime_dir", "cache_dir", "lock_dir", "state_dir", "peaks_file", "models_dir", "worker_binary"] {
        if let Some(value) = table.get_mut(key) {
            fix(value);
        }
    }
    if let Some(Value::Table(models)) = table.get_mut("models") {
        models.iter_mut().for_each(|(_, value)| fix(value));
    }
}
