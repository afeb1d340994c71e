//! Which stage computes where and where its weights are kept: `backend` and `params_backend`, as `text=cpu,vae=cuda0,*=cpu`.

use sd_proto::worker::v1::WorkerStage;

use super::memory::Storage;
use crate::ids::DeviceId;

/// A value for each of the three stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByStage<T> {
    /// The text encoder.
    pub text: T,
    /// The diffusion model.
    pub diffusion: T,
    /// The autoencoder.
    pub vae: T,
}

impl<T: Clone> ByStage<T> {
    /// The same for all.
    pub fn all(value: T) -> Self {
        Self { text: value.clone(), diffusion: value.clone(), vae: value }
    }

    /// That of a stage; the unspecified one has the diffusion model's.
    pub fn of(&self, stage: WorkerStage) -> &T {
        match stage {
            WorkerStage::Text => &self.text,
            WorkerStage::Vae => &self.vae,
            WorkerStage::Diffusion | WorkerStage::Unspecified => &self.diffusion,
        }
    }

    /// Each with its stage's name.
    pub fn named(&self) -> [(&'static str, &T); 3] {
        [("text", &self.text), ("diffusion", &self.diffusion), ("vae", &self.vae)]
    }
}

/// Which stage a name stands for: its own, and those of other programs. `None` for every stage.
fn stage_of_name(name: &str) -> Result<Option<WorkerStage>, String> {
    Ok(match name {
        "*" | "all" | "" => None,
        "text" | "te" | "clip" | "cond" | "cond_stage" | "text_encoder" => Some(WorkerStage::Text),
        "diffusion" | "dit" | "unet" | "model" | "diffusion_model" => Some(WorkerStage::Diffusion),
        "vae" | "ae" | "first_stage" => Some(WorkerStage::Vae),
        other => return Err(format!("{other:?} is no stage: write text, diffusion, vae, or * for all")),
    })
}

/// Reads a list of `STAGE=VALUE`; a value alone is meant for every stage. A stage that is named counts over `*`, wherever it stands.
fn assign<T: Clone>(
    text: &str,
    default: &ByStage<Option<T>>,
    value: impl Fn(&str) -> Result<T, String>,
) -> Result<ByStage<Option<T>>, String> {
    let mut every = None;
    let mut named: ByStage<Option<T>> = ByStage { text: None, diffusion: None, vae: None };
    for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        let (name, rest) = item.split_once('=').unwrap_or(("*", item));
        let stage = stage_of_name(name.trim())?;
        let parsed = value(rest.trim())?;
        let slot = match stage {
            None | Some(WorkerStage::Unspecified) => &mut every,
            Some(WorkerStage::Text) => &mut named.text,
            Some(WorkerStage::Diffusion) => &mut named.diffusion,
            Some(WorkerStage::Vae) => &mut named.vae,
        };
        if slot.replace(parsed).is_some() {
            return Err(format!("{:?} is set twice in {text:?}", name.trim()));
        }
    }
    let pick = |named: Option<T>, default: &Option<T>| named.or_else(|| every.clone()).or_else(|| default.clone());
    Ok(ByStage {
        text: pick(named.text, &default.text),
        diffusion: pick(named.diffusion, &default.diffusion),
        vae: pick(named.vae, &default.vae),
    })
}

/// Which device each stage computes on; what is not said is the CPU.
///
/// # Errors
/// No such stage, no such device, or one that the workers of this build cannot compute on.
pub fn devices(text: Option<&str>) -> Result<ByStage<DeviceId>, String> {
    let cpu = ByStage::all(Some(DeviceId::cpu()));
    let parsed = assign(text.unwrap_or_default(), &cpu, device)?;
    let or_cpu = |device: Option<DeviceId>| device.unwrap_or_else(DeviceId::cpu);
    Ok(ByStage { text: or_cpu(parsed.text), diffusion: or_cpu(parsed.diffusion), vae: or_cpu(parsed.vae) })
}

fn device(name: &str) -> Result<DeviceId, String> {
    let gpu = ["cuda", "gpu", "GPU-", "vulkan", "metal", "rocm", "mps"];
    match name {
        "cpu" => Ok(DeviceId::cpu()),
        name if gpu.iter().any(|prefix| name.starts_with(prefix)) => {
            Err(format!("the workers of this build cannot compute on {name}: write cpu, or install workers that can"))
        }
        other => Err(format!("there is no device {other:?}: write cpu")),
    }
}

/// Where each stage's weights are kept while they are not on the device; `None` where nothing is said.
///
/// # Errors
/// No such stage, or no such place.
pub fn storage(text: Option<&str>) -> Result<ByStage<Option<Storage>>, String> {
    let none = ByStage { text: None, diffusion: None, vae: None };
    assign(text.unwrap_or_default(), &none, |name| match name {
        "cpu" | "ram" => Ok(Storage::Ram),
        "disk" => Ok(Storage::Disk),
        other => Err(format!("weights cannot be kept on {other:?}: write cpu (host memory) or disk")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_stage_counts_over_the_rest_wherever_it_stands() {
        let parsed = storage(Some("text=disk,*=cpu")).unwrap();
        assert_eq!((parsed.text, parsed.vae), (Some(Storage::Disk), Some(Storage::Ram)));
        let turned = storage(Some("*=cpu, clip=disk")).unwrap();
        assert_eq!((turned.text, turned.diffusion), (Some(Storage::Disk), Some(Storage::Ram)));
        assert_eq!(storage(Some("disk")).unwrap(), ByStage::all(Some(Storage::Disk)));
        assert_eq!(storage(None).unwrap().unset(), 3);
        assert_eq!(devices(Some("te=cpu,vae=cpu")).unwrap(), ByStage::all(DeviceId::cpu()));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_reason() {
        for (text, word) in [
            ("vae=cuda0", "cannot compute on cuda0"),
            ("lens=cpu", "no stage"),
            ("vae=moon", "no device"),
            ("vae=cpu,ae=cpu", "twice"),
        ] {
            let error = devices(Some(text)).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        assert!(storage(Some("text=cuda0")).unwrap_err().contains("disk"));
    }

    impl ByStage<Option<Storage>> {
        fn unset(&self) -> usize {
            self.named().iter().filter(|(_, storage)| storage.is_none()).count()
        }
    }
}
