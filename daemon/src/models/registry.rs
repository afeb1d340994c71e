//! Names of models, where they lie, and what is known about them.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;

use super::Model;
use super::report::ModelReport;
use super::stamp::Stamp;
use crate::workers::{InspectError, Workers};

/// The name of the model that is built into the program.
pub const EMBEDDED: &str = "default";
/// The file that makes a folder a model.
const INDEX: &str = "model_index.json";

/// Which models there are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RegistryConfig {
    /// Models by name.
    pub models: BTreeMap<String, PathBuf>,
    /// A folder each of whose subfolders with a `model_index.json` is a model, named as the subfolder.
    pub folder: Option<PathBuf>,
    /// The model of requests that name none; absent: the one built in.
    pub default: Option<String>,
    /// Where the model that is built in is written to.
    pub cache_dir: PathBuf,
}

/// How a request names a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelRef {
    /// Not at all.
    Default,
    /// By its registered name.
    Name(String),
    /// By its folder. Whether the caller may is decided before.
    Path(PathBuf),
}

impl ModelRef {
    /// What a request's text means: a path where it has a slash or is `.` or `..`; registered names have none.
    pub fn parse(text: &str) -> Self {
        match text {
            "" => Self::Default,
            path if path.contains('/') || path == "." || path == ".." => Self::Path(path.into()),
            name => Self::Name(name.into()),
        }
    }
}

/// Why a model cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// No model of that name.
    #[error("there is no model {name:?}; there are: {}", known.join(", "))]
    Unknown {
        /// As asked for.
        name: String,
        /// Names of all that are registered.
        known: Vec<String>,
    },
    /// A path that does not begin at the root; the daemon's own folder means nothing to a client.
    #[error("model path {} is relative: send an absolute one", .0.display())]
    RelativePath(PathBuf),
    /// The folder is not there or cannot be read.
    #[error("model {name}: cannot read {}: {problem}", dir.display())]
    Unreadable {
        /// Which.
        name: String,
        /// Its folder.
        dir: PathBuf,
        /// What the system says.
        problem: String,
    },
    /// Its files are bad or not supported.
    #[error("model {name} in {} cannot be used: {problem}", dir.display())]
    Unusable {
        /// Which.
        name: String,
        /// Its folder.
        dir: PathBuf,
        /// The inspection's words.
        problem: String,
    },
    /// The inspection itself failed.
    #[error("model {name} could not be inspected: {problem}")]
    Inspection {
        /// Which.
        name: String,
        /// What went wrong.
        problem: String,
    },
    /// The model that is built in cannot be written to its cache.
    #[error("{0}")]
    Embedded(String),
}

/// What describes a model folder: the worker program, or a fake in tests.
pub trait Inspector: Send + Sync + 'static {
    /// Describes a folder as one JSON document.
    fn inspect<'a>(
        &'a self,
        folder: &'a Path,
    ) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, InspectError>> + Send + 'a>>;
}

impl Inspector for Workers {
    fn inspect<'a>(
        &'a self,
        folder: &'a Path,
    ) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, InspectError>> + Send + 'a>> {
        Box::pin(Workers::inspect(self, folder))
    }
}

/// A model in a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its folder, where it has one already.
    pub dir: PathBuf,
    /// Whether requests that name none get it.
    pub is_default: bool,
    /// What is known about it.
    pub model: Result<Arc<Model>, ModelError>,
}

/// All models of this daemon. Cheap to clone.
#[derive(Clone)]
pub struct Registry {
    inner: Arc<Inner>,
}

struct Inner {
    config: RegistryConfig,
    inspector: Arc<dyn Inspector>,
    /// By folder.
    cache: Mutex<HashMap<PathBuf, Cached>>,
    /// Inspections run one at a time: each reads files that the next may want too.
    turn: Semaphore,
}

#[derive(Clone)]
struct Cached {
    stamp: Stamp,
    report: Result<ModelReport, String>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

impl Registry {
    /// A registry whose folders are described by `inspector`. Looks at nothing yet.
    pub fn new(config: RegistryConfig, inspector: Arc<dyn Inspector>) -> Self {
        let (cache, turn) = (Mutex::default(), Semaphore::new(1));
        Self { inner: Arc::new(Inner { config, inspector, cache, turn }) }
    }

    /// The name of the model of requests that name none.
    pub fn default_name(&self) -> &str {
        self.inner.config.default.as_deref().unwrap_or(EMBEDDED)
    }

    /// Finds a model and says what is known of it, inspecting it where it is new or has changed.
    ///
    /// # Errors
    /// See [`ModelError`].
    pub async fn resolve(&self, model: &ModelRef) -> Result<Arc<Model>, ModelError> {
        match model {
            ModelRef::Default => self.by_name(self.default_name()).await,
            ModelRef::Name(name) => self.by_name(name).await,
            ModelRef::Path(path) => {
                if !path.is_absolute() {
                    return Err(ModelError::RelativePath(path.clone()));
                }
                let name = path.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
                self.describe(&name, path).await
            }
        }
    }

    /// Every registered model.
    pub async fn list(&self) -> Vec<Listed> {
        let mut listed = Vec::new();
        for (name, dir) in self.names().await {
            let model = self.located(&name, dir.clone()).await;
            let dir = model.as_ref().map(|model| model.dir.clone()).ok().or(dir).unwrap_or_default();
            let is_default = name == self.default_name();
            listed.push(Listed { name, dir, is_default, model });
        }
        listed
    }

    /// Names and folders; the built-in one has none until it is first used.
    async fn names(&self) -> BTreeMap<String, Option<PathBuf>> {
        let mut names = BTreeMap::from([(EMBEDDED.to_owned(), None)]);
        if let Some(folder) = self.inner.config.folder.clone() {
            names.extend(blocking(move || scan(&folder)).await.unwrap_or_default());
        }
        // What is written out in the configuration wins.
        names.extend(self.inner.config.models.iter().map(|(name, dir)| (name.clone(), Some(dir.clone()))));
        names
    }

    async fn by_name(&self, name: &str) -> Result<Arc<Model>, ModelError> {
        let mut names = self.names().await;
        match names.remove(name) {
            Some(dir) => self.located(name, dir).await,
            None => Err(ModelError::Unknown { name: name.into(), known: names.into_keys().collect() }),
        }
    }

    async fn located(&self, name: &str, dir: Option<PathBuf>) -> Result<Arc<Model>, ModelError> {
        match dir {
            Some(dir) => self.describe(name, &dir).await,
            None => {
                let cache_dir = self.inner.config.cache_dir.clone();
                let dir = blocking(move || sd_default_model::materialize(&cache_dir))
                    .await
                    .map_err(ModelError::Embedded)?
                    .map_err(|error| ModelError::Embedded(error.to_string()))?;
                self.describe(name, &dir).await
            }
        }
    }

    async fn describe(&self, name: &str, dir: &Path) -> Result<Arc<Model>, ModelError> {
        let unreadable =
            |problem: String| ModelError::Unreadable { name: name.into(), dir: dir.to_path_buf(), problem };
        let look = || async {
            let folder = dir.to_path_buf();
            blocking(move || Stamp::of(&folder)).await.map_err(&unreadable)?.map_err(|e| unreadable(e.to_string()))
        };
        let mut cached = self.cached(dir, &look().await?);
        if cached.is_none() {
            let failed = |problem: String| ModelError::Inspection { name: name.into(), problem };
            let _turn = self.inner.turn.acquire().await.map_err(|error| failed(error.to_string()))?;
            // Somebody else may have had the turn before, for this same folder.
            let stamp = look().await?;
            cached = self.cached(dir, &stamp);
            if cached.is_none() {
                let report = match self.inner.inspector.inspect(dir).await {
                    Ok(json) => match serde_json::from_slice::<ModelReport>(&json) {
                        Ok(report) => Ok(report),
                        Err(error) => return Err(failed(format!("its description is not understood: {error}"))),
                    },
                    Err(InspectError::BadModel(problem)) => Err(problem),
                    // Not the model's fault, so not remembered.
                    Err(error @ (InspectError::Spawn { .. } | InspectError::Failed { .. })) => {
                        return Err(failed(error.to_string()));
                    }
                };
                self.remember(dir, Cached { stamp, report: report.clone() });
                cached = Some(report);
            }
        }
        match cached {
            Some(Ok(report)) => Ok(Arc::new(Model { name: name.into(), dir: dir.into(), report })),
            Some(Err(problem)) => Err(ModelError::Unusable { name: name.into(), dir: dir.into(), problem }),
            None => Err(unreadable("it was not inspected".into())),
        }
    }

    fn cached(&self, dir: &Path, stamp: &Stamp) -> Option<Result<ModelReport, String>> {
        let cache = self.inner.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.get(dir).filter(|cached| cached.stamp == *stamp).map(|cached| cached.report.clone())
    }

    fn remember(&self, dir: &Path, cached: Cached) {
        const MOST: usize = 256;
        let mut cache = self.inner.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= MOST {
            // Only a client that goes through hundreds of paths comes here; everything can be inspected again.
            cache.clear();
        }
        cache.insert(dir.into(), cached);
    }
}

/// Subfolders that are models.
fn scan(folder: &Path) -> Vec<(String, Option<PathBuf>)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| entry.path().join(INDEX).is_file())
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, Some(entry.path()))))
        .collect()
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(work).await.map_err(|error| error.to_string())
}
#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Counts inspections; describes every folder alike.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Inspector for Counting {
        fn inspect<'a>(
            &'a self,
            folder: &'a Path,
        ) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, InspectError>> + Send + 'a>> {
            self.0.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move {
                match folder.join("strange").exists() {
                    true => Ok(b"{\"family\": 7}".to_vec()),
                    false => Ok(include_str!("sample_report.json").into()),
                }
            })
        }
    }

    fn registry(folder: &Path, models: &[(&str, &Path)]) -> (Registry, Arc<Counting>) {
        let counting = Arc::new(Counting::default());
        let config = RegistryConfig {
            models: models.iter().map(|(name, dir)| ((*name).into(), dir.to_path_buf())).collect(),
            folder: Some(folder.join("models")),
            default: None,
            cache_dir: folder.join("cache"),
        };
        (Registry::new(config, counting.clone()), counting)
    }

    #[test]
    fn names_and_paths_are_told_apart() {
        assert_eq!(ModelRef::parse(""), ModelRef::Default);
        assert_eq!(ModelRef::parse("sd-1.5"), ModelRef::Name("sd-1.5".into()));
        for path in ["/m", "./m", "m/x", ".", ".."] {
            assert_eq!(ModelRef::parse(path), ModelRef::Path(path.into()));
        }
    }

    #[tokio::test]
    async fn the_embedded_model_is_placed_when_it_is_first_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let (registry, _) = registry(dir.path(), &[]);
        assert!(!dir.path().join("cache").exists());
        let model = registry.resolve(&ModelRef::Default).await.unwrap();
        assert_eq!(model.name, EMBEDDED);
        assert!(model.dir.starts_with(dir.path().join("cache")) && model.dir.join(INDEX).is_file());
    }

    #[tokio::test]
    async fn a_folder_is_inspected_once_until_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("models/mine");
        std::fs::create_dir_all(&model).unwrap();
        std::fs::write(model.join(INDEX), "{}").unwrap();
        let (registry, counting) = registry(dir.path(), &[]);
        let reference = ModelRef::Name("mine".into());
        let (a, b) = tokio::join!(registry.resolve(&reference), registry.resolve(&reference));
        assert_eq!(a.unwrap(), b.unwrap());
        registry.resolve(&ModelRef::Path(model.clone())).await.unwrap();
        assert_eq!(counting.0.load(Ordering::SeqCst), 1);

        std::fs::write(model.join("strange"), "").unwrap();
        let error = registry.resolve(&reference).await.unwrap_err();
        assert!(matches!(&error, ModelError::Inspection { name, .. } if name == "mine"), "{error}");
        registry.resolve(&reference).await.unwrap_err();
        assert_eq!(counting.0.load(Ordering::SeqCst), 3, "a failure that is not the model's is not remembered");
    }

    #[tokio::test]
    async fn what_the_configuration_names_wins_and_an_unknown_name_lists_all() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("elsewhere");
        let scanned = dir.path().join("models/mine");
        for folder in [&own, &scanned] {
            std::fs::create_dir_all(folder).unwrap();
            std::fs::write(folder.join(INDEX), "{}").unwrap();
        }
        std::fs::create_dir_all(dir.path().join("models/no-model")).unwrap();
        let (registry, _) = registry(dir.path(), &[("mine", &own)]);
        assert_eq!(registry.resolve(&ModelRef::Name("mine".into())).await.unwrap().dir, own);
        let error = registry.resolve(&ModelRef::Name("else".into())).await.unwrap_err();
        let known = vec!["default".to_owned(), "mine".to_owned()];
        assert_eq!(error, ModelError::Unknown { name: "else".into(), known });
        let listed: Vec<_> =
            registry.list().await.into_iter().map(|l| (l.name, l.is_default, l.model.is_ok())).collect();
        assert_eq!(listed, [("default".to_owned(), true, true), ("mine".to_owned(), false, true)]);

        std::fs::remove_dir_all(&own).unwrap();
        let error = registry.resolve(&ModelRef::Name("mine".into())).await.unwrap_err();
        assert!(matches!(error, ModelError::Unreadable { .. }), "{error}");
    }
}
