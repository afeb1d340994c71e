//! The devices of a daemon: found, given their budgets, locked.

use std::path::Path;
use std::sync::Arc;

use sd_proto::instance::{DeviceLock, DeviceLockError, Holder};

use crate::config::Config;
use crate::ids::DeviceId;
use crate::residency::device::{DeviceError, GpuError, GpuSource, HostFacts, Nvml};
use crate::residency::{Budget, DeviceConfig};

/// The GPUs of the host, to be observed: this build has no worker for them. A private daemon looks for them only where the
/// configuration names one, because connecting to a driver may take longer than its call.
///
/// # Errors
/// The configuration names a GPU that is not there, or more of it than it has.
pub fn gpus(config: &Config, private: bool) -> Result<Vec<DeviceConfig>, DeviceError> {
    let named = config.devices.keys().filter(|id| **id != DeviceId::cpu()).cloned().collect::<Vec<_>>();
    if private && named.is_empty() {
        return Ok(Vec::new());
    }
    gpus_of(config, &named, Nvml::load().map(|nvml| Arc::new(nvml) as Arc<dyn GpuSource>), HostFacts::read())
}

fn gpus_of(
    config: &Config,
    named: &[DeviceId],
    source: Result<Arc<dyn GpuSource>, GpuError>,
    host: HostFacts,
) -> Result<Vec<DeviceConfig>, DeviceError> {
    let list = source.and_then(|source| Ok((source.gpus()?, source)));
    let (list, source) = match list {
        Ok(found) => found,
        Err(error) => {
            let Some(device) = named.first() else {
                if !matches!(error, GpuError::Absent(_)) {
                    tracing::warn!(%error, "GPUs cannot be observed");
                }
                return Ok(Vec::new());
            };
            return Err(DeviceError::Unknown { device: device.clone(), known: format!("cpu ({error})") });
        }
    };
    list.problems.iter().for_each(|problem| tracing::warn!(problem, "a GPU does not answer"));
    let known = || {
        let gpus =
            list.gpus.iter().enumerate().map(|(number, gpu)| format!("cuda{number} = {} ({})", gpu.id, gpu.name));
        std::iter::once("cpu".to_owned()).chain(gpus).collect::<Vec<_>>().join(", ")
    };
    let mut budgets = vec![Budget::Auto; list.gpus.len()];
    for id in named {
        let number = match id.as_str().strip_prefix("cuda") {
            Some(number) => number.parse().ok().filter(|number| *number < list.gpus.len()),
            None => list.gpus.iter().position(|gpu| gpu.id == *id),
        };
        let Some(number) = number else { return Err(DeviceError::Unknown { device: id.clone(), known: known() }) };
        budgets[number] = config.devices.get(id).copied().unwrap_or_default();
    }
    let mut devices = Vec::new();
    for (facts, budget) in list.gpus.into_iter().zip(budgets) {
        match DeviceConfig::gpu(facts, &source, host, budget) {
            Ok(device) => devices.push(device),
            // Whoever named it must know; the others only look.
            Err(error @ DeviceError::Budget { .. }) => return Err(error),
            Err(error) => tracing::warn!(%error, "a GPU cannot be observed"),
        }
    }
    Ok(devices)
}

/// Locks a device for this daemon: alone, or by its budget where the configuration shares it.
///
/// # Errors
/// Another daemon has it, or those that share it have promised too much.
pub fn lock(
    config: &Config,
    lock_dir: &Path,
    device: &DeviceConfig,
    holder: &Holder,
) -> Result<DeviceLock, DeviceLockError> {
    if config.shared.contains(&device.id) {
        DeviceLock::share(lock_dir, device.id.as_str(), holder, device.budget, device.total)
    } else {
        DeviceLock::acquire(lock_dir, device.id.as_str(), holder)
    }
}
