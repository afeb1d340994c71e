//! Reading `config.json`: what is supported is taken, what would change the result and is not supported is refused.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use thiserror::Error;

/// A configuration that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is missing or unreadable.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is no JSON object.
    #[error("{}: not a configuration: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A field has a value that is not supported.
    #[error("{}: {field} = {value} is not supported; {remedy}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value as JSON.
        value: String,
        /// What is supported.
        remedy: String,
    },
}

/// The fields of one configuration file.
#[derive(Clone, Debug)]
pub(crate) struct Fields {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Fields {
    /// Reads `path`.
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read(path).map_err(|source| ConfigError::Io { path: path.to_path_buf(), source })?;
        match serde_json::from_slice(&text) {
            Ok(Value::Object(map)) => Ok(Self { path: path.to_path_buf(), map }),
            Ok(_) => Err(ConfigError::Json { path: path.to_path_buf(), reason: "it is no object".into() }),
            Err(e) => Err(ConfigError::Json { path: path.to_path_buf(), reason: e.to_string() }),
        }
    }

    /// The field's value; `None` if it is absent or null.
    pub(crate) fn value(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    /// Whether the field is there and null.
    pub(crate) fn is_null(&self, field: &str) -> bool {
        self.map.get(field).is_some_and(Value::is_null)
    }

    /// A refusal of the field's present value.
    pub(crate) fn refuse(&self, field: &str, remedy: impl Into<String>) -> ConfigError {
        ConfigError::Unsupported {
            path: self.path.clone(),
            field: field.into(),
            value: self.map.get(field).unwrap_or(&Value::Null).to_string(),
            remedy: remedy.into(),
        }
    }

    /// The field, if it is there and not null.
    pub(crate) fn optional<T: DeserializeOwned>(&self, field: &str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match T::deserialize(value) {
            Ok(value) => Ok(Some(value)),
            Err(e) => Err(self.refuse(field, format!("{e}"))),
        }
    }

    /// The field, or `default`.
    pub(crate) fn or<T: DeserializeOwned>(&self, field: &str, default: T) -> Result<T, ConfigError> {
        Ok(self.optional(field)?.unwrap_or(default))
    }

    /// A field that holds one value for all of `count` blocks or a list of one each.
    pub(crate) fn each<T: DeserializeOwned + Clone>(
        &self,
        field: &str,
        default: T,
        count: usize,
    ) -> Result<Vec<T>, ConfigError> {
        let Some(value) = self.value(field) else { return Ok(vec![default; count]) };
        if let Ok(one) = T::deserialize(value) {
            return Ok(vec![one; count]);
        }
        match Vec::<T>::deserialize(value) {
            Ok(list) if list.len() == count => Ok(list),
            Ok(list) => {
                Err(self.refuse(field, format!("it must have {count} entries, one a block, not {}", list.len())))
            }
            Err(e) => Err(self.refuse(field, format!("{e}"))),
        }
    }

    /// Refuses the field unless it is absent, null or equal to `only`.
    pub(crate) fn only(&self, field: &str, only: impl Into<Value>) -> Result<(), ConfigError> {
        let only = only.into();
        let same = |value: &Value| *value == only || (value.as_f64().is_some() && value.as_f64() == only.as_f64());
        match self.value(field) {
            Some(value) if !same(value) => Err(self.refuse(field, format!("the supported value is {only}"))),
            _ => Ok(()),
        }
    }

    /// Refuses the field if it is there and not null.
    pub(crate) fn absent(&self, field: &str) -> Result<(), ConfigError> {
        match self.value(field) {
            Some(_) => Err(self.refuse(field, "the supported value is null")),
            None => Ok(()),
        }
    }

    /// The field as a count, which must be at least 1.
    pub(crate) fn count(&self, field: &str, default: usize) -> Result<usize, ConfigError> {
        match self.or(field, default)? {
            0 => Err(self.refuse(field, "it must be at least 1")),
            n => Ok(n),
        }
    }
}

/// The square of `sample_size`, which may be one number or `[height, width]`; height is given.
pub(crate) fn sample_size(fields: &Fields) -> Result<Option<[usize; 2]>, ConfigError> {
    match fields.value("sample_size") {
        None => Ok(None),
        Some(Value::Array(_)) => fields.optional("sample_size"),
        Some(_) => Ok(fields.optional::<usize>("sample_size")?.map(|s| [s, s])),
    }
}
