//! What the doctor says of GPUs and of what decides what their driver can show. `sdd --devices` looks; it needs no daemon.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use super::{Check, human};

/// Connecting to a driver that nobody keeps loaded takes some seconds for every GPU.
const LOOK_LIMIT: Duration = Duration::from_secs(30);
/// How many processes of a GPU are named.
const NAMED: usize = 5;

/// Has `sdd` look at the devices, and judges what it found.
pub(super) async fn checks(sdd: Option<&Path>, locked: Option<u64>) -> Vec<Check> {
    // Its absence has a line of its own.
    let Some(sdd) = sdd else { return Vec::new() };
    match look(sdd).await {
        Ok(report) => judge(&report, locked),
        Err(error) => {
            let found = format!("{} --devices: {error}", sdd.display());
            vec![Check::warn("devices", found, "install sdd and sdctl from one build")]
        }
    }
}

async fn look(sdd: &Path) -> Result<Value, String> {
    let mut command = tokio::process::Command::new(sdd);
    command.arg("--devices").stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(LOOK_LIMIT, command.output()).await {
        Ok(output) => output.map_err(|error| error.to_string())?,
        Err(_) => return Err(format!("no answer within {} s: the driver hangs", LOOK_LIMIT.as_secs())),
    };
    if !output.status.success() {
        return Err(format!("ended with {}", output.status));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
}

fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value[key].as_str()
}

/// Judges a report; `locked` is how much memory this user may lock, `None` for no bound.
fn judge(report: &Value, locked: Option<u64>) -> Vec<Check> {
    let none = Vec::new();
    let gpus = report["gpus"].as_array().unwrap_or(&none);
    let mut checks = vec![driver(&report["driver"], gpus.len(), report["wsl"] == true)];
    for (number, gpu) in gpus.iter().enumerate() {
        checks.push(state(number, gpu));
        checks.extend(processes(gpu));
    }
    for problem in report["problems"].as_array().unwrap_or(&none) {
        let remedy = "reset it or restart the host; see dmesg for Xid messages";
        checks.push(Check::fail("gpu", problem.as_str().unwrap_or("a GPU does not answer"), remedy));
    }
    if report["wsl"] == true {
        let found = "Linux inside Windows: the driver shows no processes of a GPU, so releases are inferred from its free memory";
        checks.push(Check::warn("wsl", found, "nothing to do; close Windows programs that use the GPU"));
    }
    if !gpus.is_empty() {
        checks.extend(mps(report["mps"] == true));
        checks.extend(container(report["nested_processes"] == true));
        checks.extend(locked.filter(|limit| *limit < 1 << 30).map(|limit| {
            let found = format!("at most {} can be page-locked for copies to a GPU", human::bytes(limit));
            let remedy = "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1";
            Check::warn("gpu copies", found, remedy)
        }));
    }
    checks
}

fn driver(driver: &Value, gpus: usize, wsl: bool) -> Check {
    let name = "gpu driver";
    if let (Some(version), Some(cuda)) = (text(&driver["present"], "version"), text(&driver["present"], "cuda")) {
        let gpus = human::count(gpus as u64, "GPU");
        return Check::ok(name, format!("NVIDIA {version}, CUDA up to {cuda}, {gpus}; this build computes on the CPU"));
    }
    if let Some(why) = text(driver, "absent") {
        let found = format!("none, so stages run on the CPU ({why})");
        return match wsl {
            true => Check::warn(name, found, "install the NVIDIA driver in Windows, not in WSL"),
            false => Check::ok(name, found),
        };
    }
    let why = text(driver, "problem").unwrap_or("it says nothing");
    let remedy = "make library and loaded driver the same version: reload the driver or restart the host";
    Check::fail(name, why, remedy)
}

fn state(number: usize, gpu: &Value) -> Check {
    let title = format!(
        "cuda{number} {} {} at {}",
        text(gpu, "id").unwrap_or("?"),
        text(gpu, "name").unwrap_or("?"),
        text(gpu, "bus").unwrap_or("?")
    );
    let memory = &gpu["state"]["memory"];
    let (Some(total), Some(free)) = (memory["total"].as_u64(), memory["free"].as_u64()) else {
        let why = text(&gpu["state"], "problem").unwrap_or("it does not say how much memory it has");
        return Check::fail(
            "gpu",
            format!("{title}: {why}"),
            "reset it or restart the host; see dmesg for Xid messages",
        );
    };
    let mode = text(gpu, "compute_mode");
    let divided = gpu["divided"].as_bool();
    let found = format!(
        "{title}: {} free of {}, compute mode {}, {}, capability {}",
        human::bytes(free),
        human::bytes(total),
        mode.unwrap_or("not told"),
        match divided {
            Some(true) => "divided by MIG",
            Some(false) => "not divided (MIG off)",
            None => "no MIG",
        },
        text(gpu, "capability").unwrap_or("not told"),
    );
    let id = text(gpu, "id").unwrap_or_default();
    match (mode, divided) {
        (Some("prohibited"), _) => {
            Check::fail("gpu", found, format!("let programs use it: nvidia-smi -i {id} -c DEFAULT"))
        }
        (Some("exclusive process"), _) => Check::warn(
            "gpu",
            format!("{found}; one process at a time may use it, and every stage is a process"),
            format!("nvidia-smi -i {id} -c DEFAULT, or start MPS"),
        ),
        (_, Some(true)) => {
            Check::warn("gpu", format!("{found}; its instances are not used"), format!("nvidia-smi -i {id} -mig 0"))
        }
        (_, Some(false) | None) => Check::ok("gpu", found),
    }
}

fn processes(gpu: &Value) -> Option<Check> {
    let name = "gpu processes";
    let memory = gpu["state"].get("memory")?;
    let id = text(gpu, "id").unwrap_or("?");
    if let Some(why) = text(memory, "hidden") {
        let found = format!("{id}: {why}; releases are inferred from its free memory");
        return Some(Check::warn(name, found, "in a container: share the host's processes (docker run --pid=host)"));
    }
    let list = memory["processes"].as_array()?;
    if list.is_empty() {
        return Some(Check::ok(name, format!("{id}: none")));
    }
    let line = |process: &Value| {
        let bytes = process["bytes"].as_u64().map_or("size not told".into(), human::bytes);
        let name = text(process, "name").filter(|name| !name.is_empty()).unwrap_or("?");
        format!("{name} (pid {}) {bytes}", process["pid"])
    };
    let mut shown: Vec<String> = list.iter().take(NAMED).map(line).collect();
    if list.len() > NAMED {
        shown.push(format!("and {} more", list.len() - NAMED));
    }
    let found = format!("{id}: {}", shown.join(", "));
    let (total, free) = (memory["total"].as_u64()?, memory["free"].as_u64()?);
    Some(if free < total / 2 {
        Check::warn(name, found, "end those that are not needed; what they hold cannot be used for pictures")
    } else {
        Check::ok(name, found)
    })
}

fn mps(runs: bool) -> Option<Check> {
    let found = "NVIDIA's MPS runs: its clients share one context, so a fault of one ends all";
    runs.then(|| Check::warn("mps", found, "echo quit | nvidia-cuda-mps-control, unless the compute mode needs it"))
}

fn container(nested: bool) -> Option<Check> {
    let found =
        "processes have a namespace of their own here: programs outside are seen by what they hold in sum, not by name";
    nested.then(|| Check::ok("container", found))
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;
    use serde_json::json;

    fn gpu(mode: &str, free: u64, processes: Value) -> Value {
        json!({ "id": "GPU-1", "name": "H200", "bus": "00:17", "compute_mode": mode, "divided": false, "capability": "9.0",
                "state": { "memory": { "total": 100u64 << 30, "free": free, "processes": processes, "hidden": null } } })
    }

    fn report(gpus: Value) -> Value {
        json!({ "wsl": false, "nested_processes": false, "mps": false, "gpus": gpus, "problems": [],
                "driver": { "present": { "version": "580.1", "cuda": "13.0" } } })
    }

    fn found(checks: &[Check], name: &str) -> (Level, String) {
        let check = checks.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("no {name}: {checks:?}"));
        (check.level, format!("{} {}", check.found, check.remedy.clone().unwrap_or_default()))
    }

    #[test]
    fn a_driver_that_is_not_there_is_said_and_no_gpu_is_made_up() {
        let checks = judge(&json!({ "driver": { "absent": "no library" }, "gpus": [] }), None);
        assert_eq!(checks.len(), 1);
        let (level, text) = found(&checks, "gpu driver");
        assert!(level == Level::Ok && text.contains("no library") && text.contains("CPU"), "{text}");
        let checks = judge(&json!({ "driver": { "problem": "version mismatch" }, "gpus": [] }), None);
        assert_eq!(found(&checks, "gpu driver").0, Level::Fail);
    }

    #[test]
    fn a_gpu_is_shown_with_who_uses_it() {
        let who =
            json!([{ "pid": 7, "name": "python", "bytes": 60u64 << 30 }, { "pid": 8, "name": "", "bytes": null }]);
        let checks = judge(&report(json!([gpu("default", 40 << 30, who)])), None);
        let (level, text) = found(&checks, "gpu");
        assert_eq!(level, Level::Ok);
        for word in ["cuda0 GPU-1 H200", "40.0 GiB free of 100 GiB", "MIG off", "default"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        let (level, text) = found(&checks, "gpu processes");
        assert!(level == Level::Warn && text.contains("python (pid 7) 60.0 GiB, ? (pid 8) size not told"), "{text}");
    }

    #[test]
    fn what_keeps_stages_from_a_gpu_comes_with_its_remedy() {
        let level = |mode| found(&judge(&report(json!([gpu(mode, 1 << 30, json!([]))])), None), "gpu");
        assert!(matches!(level("exclusive process"), (Level::Warn, text) if text.contains("-c DEFAULT")));
        assert_eq!(level("prohibited").0, Level::Fail);
        let lost = json!({ "id": "GPU-1", "state": { "problem": "the device is lost" } });
        let mut sick = report(json!([lost]));
        sick["problems"] = json!(["GPU number 3: fell off the bus"]);
        sick["mps"] = json!(true);
        sick["wsl"] = json!(true);
        let checks = judge(&sick, Some(64 << 10));
        assert_eq!(checks.iter().filter(|check| check.level == Level::Fail).count(), 2, "{checks:?}");
        for name in ["mps", "wsl", "gpu copies"] {
            assert_eq!(found(&checks, name).0, Level::Warn);
        }
        let mut blind = gpu("default", 1 << 30, json!([]));
        blind["state"]["memory"]["hidden"] = json!("no process is shown");
        assert!(matches!(found(&judge(&report(json!([blind])), None), "gpu processes"), (Level::Warn, text)
            if text.contains("inferred") && text.contains("--pid=host")));
    }
}
