//! A job as it is recorded, and the format of the record.
//!
//! A record is a line `sdd-job VERSION SHA256` and a JSON document, whose bytes the SHA-256 is of. Request and numeric plan stand
//! in it as the public interface encodes them, in hexadecimal digits, so that a field which is added there is recorded too.
//! What is large lies in files beside the record, each named in it with its length and SHA-256. A file of the request that is
//! missing or damaged makes the record unusable; one of the progress costs the progress.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message as _;
use sd_proto::v1::{ImageRequest, NumericPlan};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::progress::{Mark, Progress};
use crate::ids::{JobId, Tenant};
use crate::jobs::request::{Admitted, ImageFile};

/// Version of the format.
pub const VERSION: u32 = 1;
const MAGIC: &str = "sdd-job";
/// The picture that a request starts from.
pub(super) const IMAGE: &str = "image";
/// Its mask.
pub(super) const MASK: &str = "mask";

/// Which model a job was admitted with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelMark {
    /// Its name.
    pub name: String,
    /// Its folder.
    pub dir: String,
    /// Changes with configurations and weights.
    pub fingerprint: String,
}

/// All that is needed to run a job again and give the same bytes.
#[derive(Clone, PartialEq)]
pub struct DurableJob {
    /// Its id.
    pub id: JobId,
    /// Whose.
    pub tenant: Tenant,
    /// Counts up with the jobs that this store has taken.
    pub order: u64,
    /// When it was submitted, in whole milliseconds.
    pub submitted: SystemTime,
    /// Its model.
    pub model: ModelMark,
    /// The request as admitted: seed and every default filled in, without its image files.
    pub request: ImageRequest,
    /// The numeric choices that decide the bytes.
    pub plan: NumericPlan,
    /// The picture to start from.
    pub image: Option<ImageFile>,
    /// White where it is to be painted anew.
    pub mask: Option<ImageFile>,
    /// What was done of it when its daemon ended in order.
    pub progress: Progress,
    /// Runs of it during which the daemon was killed. Not part of the record: see [`super::Store::note_start`].
    pub broken_runs: u32,
}

impl std::fmt::Debug for DurableJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the prompt: this may come into a log.
        f.debug_struct("DurableJob").field("id", &self.id).field("order", &self.order).finish_non_exhaustive()
    }
}

/// Why bytes are no record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Not this format at all.
    #[error("it is no record of a job")]
    Foreign,
    /// Another program's version of it.
    #[error("its format has version {found}, this program knows {VERSION}")]
    Version {
        /// As it says.
        found: u32,
    },
    /// Written half, or changed since.
    #[error("its checksum does not match: it was not written whole or was changed")]
    Checksum,
    /// The right checksum over something that is not understood.
    #[error("its {0} is not understood")]
    Content(&'static str),
    /// A file beside it is not what the record says.
    #[error("its file {name:?} {problem}")]
    File {
        /// Which file.
        name: String,
        /// What is wrong.
        problem: String,
    },
}

#[derive(Serialize, Deserialize)]
struct Body {
    id: String,
    tenant: String,
    order: u64,
    submitted_ms: u64,
    model: String,
    model_dir: String,
    model_fingerprint: String,
    request: String,
    plan: String,
    #[serde(default)]
    files: Vec<FileMark>,
    #[serde(default)]
    progress: Vec<Part>,
}

/// A part of the progress, and the file that holds it.
#[derive(Serialize, Deserialize)]
struct Part {
    what: Mark,
    file: FileMark,
}

/// A file to be written beside a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beside<'a> {
    /// How the record names it.
    pub mark: FileMark,
    /// Its bytes.
    pub bytes: Cow<'a, [u8]>,
}

/// A file beside a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMark {
    /// Lower-case letters, digits and dashes.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of its bytes, 64 hexadecimal digits.
    pub sha256: String,
}

impl FileMark {
    /// Checks a file's bytes.
    ///
    /// # Errors
    /// [`RecordError::File`].
    pub fn check(&self, bytes: &[u8]) -> Result<(), RecordError> {
        let problem = if bytes.len() as u64 != self.bytes {
            format!("has {} bytes instead of {}", bytes.len(), self.bytes)
        } else if sha256(bytes) != self.sha256 {
            "has another checksum than the record says".into()
        } else {
            return Ok(());
        };
        Err(RecordError::File { name: self.name.clone(), problem })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?)).collect()
}

/// Whether a text can be the name of a file beside a record, or a job's id: nothing that leads out of the folder.
pub(super) fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !name.is_empty() && name.len() <= 64 && name.bytes().all(plain)
}

impl DurableJob {
    /// The record of a job that was admitted.
    pub fn of(id: JobId, tenant: Tenant, order: u64, submitted: SystemTime, request: &Admitted) -> Self {
        let since = submitted.duration_since(UNIX_EPOCH).unwrap_or_default();
        let initial = request.initial.as_ref();
        Self {
            id,
            tenant,
            order,
            submitted: UNIX_EPOCH + Duration::from_millis(since.as_millis() as u64),
            model: ModelMark {
                name: request.model.name.clone(),
                dir: request.model.dir.display().to_string(),
                fingerprint: request.model.report.fingerprint.clone(),
            },
            request: request.to_proto(),
            plan: request.plan.clone(),
            image: initial.map(|initial| initial.image.clone()),
            mask: initial.and_then(|initial| initial.mask.clone()),
            progress: Progress::default(),
            broken_runs: 0,
        }
    }

    /// The record's bytes, and what lies beside it.
    pub fn encode(&self) -> (Vec<u8>, Vec<Beside<'_>>) {
        let since = self.submitted.duration_since(UNIX_EPOCH).unwrap_or_default();
        let image = self.image.iter().map(|file| (IMAGE, file));
        let pictures = image.chain(self.mask.iter().map(|file| (MASK, file)));
        let mut beside: Vec<Beside<'_>> = pictures
            .map(|(name, file)| Beside {
                mark: FileMark { name: name.into(), bytes: file.bytes().len() as u64, sha256: file.sha256().into() },
                bytes: Cow::Borrowed(file.bytes()),
            })
            .collect();
        let files = beside.iter().map(|file| file.mark.clone()).collect();
        let mut progress = Vec::new();
        for (what, bytes) in self.progress.parts() {
            let sha256 = sha256(&bytes);
            // Named after its contents: what an older record names is never overwritten by something else.
            let name = format!("done-{}", &sha256[..32]);
            let mark = FileMark { name, bytes: bytes.len() as u64, sha256 };
            progress.push(Part { what, file: mark.clone() });
            beside.push(Beside { mark, bytes: Cow::Owned(bytes) });
        }
        let body = Body {
            id: self.id.to_string(),
            tenant: self.tenant.to_string(),
            order: self.order,
            submitted_ms: since.as_millis() as u64,
            model: self.model.name.clone(),
            model_dir: self.model.dir.clone(),
            model_fingerprint: self.model.fingerprint.clone(),
            request: hex(&self.request.encode_to_vec()),
            plan: hex(&self.plan.encode_to_vec()),
            files,
            progress,
        };
        let json = serde_json::to_vec_pretty(&body).expect("texts and numbers are JSON");
        let mut record = format!("{MAGIC} {VERSION} {}\n", sha256(&json)).into_bytes();
        record.extend(json);
        (record, beside)
    }

    /// Reads a record; `file` gives the bytes of each file beside it.
    ///
    /// # Errors
    /// See [`RecordError`]. No message repeats what the record holds.
    pub fn decode(
        record: &[u8],
        mut file: impl FnMut(&FileMark) -> Result<Vec<u8>, RecordError>,
    ) -> Result<Self, RecordError> {
        let end = record.iter().take(128).position(|byte| *byte == b'\n').ok_or(RecordError::Foreign)?;
        let (head, json) = (&record[..end], &record[end + 1..]);
        let head = std::str::from_utf8(head).map_err(|_| RecordError::Foreign)?;
        let mut words = head.split(' ');
        if words.next() != Some(MAGIC) {
            return Err(RecordError::Foreign);
        }
        let version = words.next().and_then(|word| word.parse().ok()).ok_or(RecordError::Foreign)?;
        if version != VERSION {
            return Err(RecordError::Version { found: version });
        }
        if words.next() != Some(&sha256(json)) {
            return Err(RecordError::Checksum);
        }
        let body: Body = serde_json::from_slice(json).map_err(|_| RecordError::Content("document"))?;
        if !is_plain(&body.id) {
            return Err(RecordError::Content("id"));
        }
        let request = unhex(&body.request).and_then(|bytes| ImageRequest::decode(bytes.as_slice()).ok());
        let plan = unhex(&body.plan).and_then(|bytes| NumericPlan::decode(bytes.as_slice()).ok());
        let (mut image, mut mask) = (None, None);
        for mark in &body.files {
            if !is_plain(&mark.name) {
                return Err(RecordError::Content("list of files"));
            }
            let slot = match mark.name.as_str() {
                IMAGE => &mut image,
                MASK => &mut mask,
                _ => return Err(RecordError::Content("list of files")),
            };
            let bytes = file(mark)?;
            mark.check(&bytes)?;
            *slot = Some(ImageFile::new(&bytes));
        }
        let mut progress = Progress::default();
        for Part { what, file: mark } in body.progress {
            let bytes = if is_plain(&mark.name) { file(&mark) } else { Err(RecordError::Content("list of files")) };
            let taken = bytes.and_then(|bytes| {
                mark.check(&bytes)?;
                progress.take(what, bytes).ok_or(RecordError::Content("progress"))
            });
            if let Err(error) = taken {
                tracing::warn!(job = body.id, %error, "what was done of a job is damaged: it begins anew");
                progress = Progress::default();
                break;
            }
        }
        Ok(Self {
            id: body.id.into(),
            tenant: body.tenant.into(),
            order: body.order,
            submitted: UNIX_EPOCH + Duration::from_millis(body.submitted_ms),
            model: ModelMark { name: body.model, dir: body.model_dir, fingerprint: body.model_fingerprint },
            request: request.ok_or(RecordError::Content("request"))?,
            plan: plan.ok_or(RecordError::Content("numeric plan"))?,
            image,
            mask,
            progress,
            broken_runs: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::fixtures;
    use crate::jobs::request::InitialImage;
    use proptest::prelude::*;

    fn with_pictures() -> DurableJob {
        let initial =
            InitialImage { image: ImageFile::new(b"a picture"), mask: Some(ImageFile::new(b"a mask")), strength: 0.5 };
        let request = Admitted { initial: Some(initial), prompt: "a secret \"heart\"".into(), ..fixtures::admitted() };
        DurableJob::of("00ff".into(), "uid:7".into(), 3, SystemTime::now(), &request)
    }

    fn file(mark: &FileMark) -> Result<Vec<u8>, RecordError> {
        Ok(if mark.name == IMAGE { b"a picture".to_vec() } else { b"a mask".to_vec() })
    }

    #[test]
    fn a_record_gives_the_job_back() {
        let job = with_pictures();
        let (record, beside) = job.encode();
        assert_eq!(beside.iter().map(|file| file.mark.name.as_str()).collect::<Vec<_>>(), [IMAGE, MASK]);
        assert_eq!(DurableJob::decode(&record, file), Ok(job.clone()));
        assert!(!String::from_utf8_lossy(&record).contains("secret"), "a prompt is not to be found by a glance");
        assert!(!format!("{job:?}").contains("secret"));
        assert_eq!(job.request.seed, Some(1));
    }

    #[test]
    fn what_is_no_record_is_told_apart() {
        let job = with_pictures();
        let record = job.encode().0;
        let text = String::from_utf8(record.clone()).unwrap();
        let other = text.replacen("sdd-job 1", "sdd-job 2", 1);
        assert_eq!(DurableJob::decode(other.as_bytes(), file), Err(RecordError::Version { found: 2 }));
        assert_eq!(DurableJob::decode(b"", file), Err(RecordError::Foreign));
        assert_eq!(DurableJob::decode(b"{}\n", file), Err(RecordError::Foreign));
        let wrong = DurableJob::decode(&record, |_| Ok(b"another picture".to_vec())).unwrap_err();
        assert!(matches!(&wrong, RecordError::File { name, .. } if name == IMAGE), "{wrong}");
        let wrong = DurableJob::decode(&record, |_| Ok(b"A picture".to_vec())).unwrap_err();
        assert!(matches!(&wrong, RecordError::File { name, .. } if name == IMAGE), "{wrong}");
    }

    #[test]
    fn no_record_leads_out_of_its_folder() {
        let mut job = with_pictures();
        job.id = "../x".into();
        assert_eq!(DurableJob::decode(&job.encode().0, file), Err(RecordError::Content("id")));
        for name in ["", "..", "a/b", "A", "a.b"] {
            assert!(!is_plain(name), "{name}");
        }
    }

    proptest! {
        /// However a record is cut or changed, it is refused, and nothing panics.
        #[test]
        fn a_torn_or_changed_record_is_refused(cut in 0usize..2000, at in 0usize..2000, bits in 1u8..=255) {
            let record = with_pictures().encode().0;
            let cut = cut % record.len();
            prop_assert!(DurableJob::decode(&record[..cut], file).is_err());
            let mut changed = record.clone();
            let at = at % record.len();
            changed[at] ^= bits;
            prop_assert!(DurableJob::decode(&changed, file).is_err());
        }
    }
}
