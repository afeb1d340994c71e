//! NVIDIA's management library. It is loaded when it is asked for, so that one program runs on hosts with and without it, and
//! it needs no CUDA context.

use std::ffi::OsStr;

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::ComputeMode as NvmlComputeMode;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use super::gpu::{ComputeMode, DriverFacts, GpuError, GpuFacts, GpuList, GpuMemory, GpuProcess, GpuSource, merge};
use crate::ids::DeviceId;

/// Where the library is, in this order: as the loader finds it, and where WSL has it.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1"];

/// The driver of this host's NVIDIA GPUs.
pub struct Nvml {
    nvml: nvml_wrapper::Nvml,
}

impl std::fmt::Debug for Nvml {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nvml").finish_non_exhaustive()
    }
}

impl Nvml {
    /// Loads the library and connects to the driver.
    ///
    /// # Errors
    /// [`GpuError::Absent`] where there is no library or no driver; [`GpuError::Failed`] for all else, such as a library that
    /// does not belong to the loaded driver.
    pub fn load() -> Result<Self, GpuError> {
        let mut last = None;
        for path in LIBRARIES {
            match nvml_wrapper::Nvml::builder().lib_path(OsStr::new(path)).init() {
                Ok(nvml) => return Ok(Self { nvml }),
                Err(error @ NvmlError::LibloadingError(_)) => last = last.or(Some(error)),
                Err(error) => return Err(judge(error, "the driver")),
            }
        }
        let found = last.map(|error| error.to_string()).unwrap_or_default();
        Err(GpuError::Absent(format!("{} cannot be loaded ({found})", LIBRARIES[0])))
    }

    fn device(&self, gpu: &DeviceId) -> Result<Device<'_>, GpuError> {
        self.nvml.device_by_uuid(gpu.as_str()).map_err(|error| match error {
            // It was there when the devices were listed.
            NvmlError::NotFound => GpuError::Lost(format!("{gpu} is no longer there")),
            error => judge(error, gpu),
        })
    }
}

/// What an error means; `about` is what was asked.
fn judge(error: NvmlError, about: impl std::fmt::Display) -> GpuError {
    let text = format!("{about}: {error}");
    match error {
        NvmlError::DriverNotLoaded | NvmlError::LibraryNotFound | NvmlError::LibloadingError(_) => {
            GpuError::Absent(text)
        }
        NvmlError::GpuLost | NvmlError::ResetRequired => GpuError::Lost(text),
        NvmlError::NotSupported
        | NvmlError::NoPermission
        | NvmlError::FunctionNotFound
        | NvmlError::FailedToLoadSymbol(_) => GpuError::Untold(text),
        NvmlError::LibRmVersionMismatch => GpuError::Failed(format!(
            "{text}: the library is not the loaded driver's; reload the driver or restart the host"
        )),
        // The wrapper's own, and those of a moment.
        error => GpuError::Failed(format!("{about}: {error}")),
    }
}

/// What is not told is `None`; other errors stay errors.
fn told<T>(answer: Result<T, NvmlError>, about: &DeviceId) -> Result<Option<T>, GpuError> {
    match answer.map_err(|error| judge(error, about)) {
        Ok(value) => Ok(Some(value)),
        Err(GpuError::Untold(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn facts(device: &Device<'_>) -> Result<GpuFacts, GpuError> {
    let id: DeviceId = device.uuid().map_err(|error| judge(error, "a GPU's UUID"))?.into();
    let must = |error| judge(error, &id);
    let compute_mode = told(device.compute_mode(), &id)?.map(|mode| match mode {
        NvmlComputeMode::Default => ComputeMode::Shared,
        NvmlComputeMode::ExclusiveThread | NvmlComputeMode::ExclusiveProcess => ComputeMode::Exclusive,
        NvmlComputeMode::Prohibited => ComputeMode::Prohibited,
    });
    let capability = told(device.cuda_compute_capability(), &id)?;
    Ok(GpuFacts {
        name: device.name().map_err(must)?,
        bus: device.pci_info().map_err(must)?.bus_id,
        compute_mode,
        divided: told(device.mig_mode(), &id)?.map(|mode| mode.current != 0),
        capability: capability.map(|version| format!("{}.{}", version.major, version.minor)),
        id,
    })
}

fn process(info: ProcessInfo) -> GpuProcess {
    let bytes = match info.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    };
    GpuProcess { pid: info.pid, bytes }
}

impl GpuSource for Nvml {
    fn driver(&self) -> Result<DriverFacts, GpuError> {
        let driver = self.nvml.sys_driver_version().map_err(|error| judge(error, "the driver's version"))?;
        let cuda = self.nvml.sys_cuda_driver_version().map_err(|error| judge(error, "the driver's CUDA version"))?;
        Ok(DriverFacts { driver, cuda: format!("{}.{}", cuda / 1000, cuda % 1000 / 10) })
    }

    fn gpus(&self) -> Result<GpuList, GpuError> {
        let count = self.nvml.device_count().map_err(|error| judge(error, "the number of GPUs"))?;
        let mut list = GpuList::default();
        for index in 0..count {
            let device = self.nvml.device_by_index(index).map_err(|error| judge(error, format!("GPU number {index}")));
            match device.and_then(|device| facts(&device)) {
                Ok(facts) => list.gpus.push(facts),
                // One that is lost must not hide the others.
                Err(error) => list.problems.push(error.to_string()),
            }
        }
        list.gpus.sort_by(|one, other| one.bus.cmp(&other.bus));
        Ok(list)
    }

    fn memory(&self, gpu: &DeviceId) -> Result<GpuMemory, GpuError> {
        let memory = self.device(gpu)?.memory_info().map_err(|error| judge(error, gpu))?;
        Ok(GpuMemory { total: memory.total, free: memory.free, reserved: memory.reserved })
    }

    fn processes(&self, gpu: &DeviceId) -> Result<Vec<GpuProcess>, GpuError> {
        let device = self.device(gpu)?;
        let list = |answer: Result<Vec<ProcessInfo>, NvmlError>| {
            answer.map(|list| list.into_iter().map(process).collect::<Vec<_>>())
        };
        // Where the driver does not tell who computes, it tells nothing that counts.
        let computing = list(device.running_compute_processes()).map_err(|error| judge(error, gpu))?;
        let drawing = told(list(device.running_graphics_processes()), gpu)?;
        let through_mps = told(list(device.mps_running_compute_processes()), gpu)?;
        Ok(merge([computing, drawing.unwrap_or_default(), through_mps.unwrap_or_default()]))
    }
}
