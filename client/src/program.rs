//! Which `sdd` is started.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::StartError;

/// Environment variable that names the `sdd` to start.
pub(crate) const PROGRAM_VARIABLE: &str = "SDCTL_SDD";

/// The `sdd` to start: `SDCTL_SDD`, else the one beside this program, else the first on the PATH.
///
/// # Errors
/// [`StartError::NoProgram`] says where it was looked for.
pub fn find_program() -> Result<PathBuf, StartError> {
    let beside = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
    find_program_in(std::env::var_os(PROGRAM_VARIABLE), beside, std::env::var_os("PATH"))
}

fn find_program_in(
    variable: Option<OsString>,
    beside: Option<PathBuf>,
    path: Option<OsString>,
) -> Result<PathBuf, StartError> {
    let runs = |file: &Path| file.is_file() && nix::unistd::access(file, nix::unistd::AccessFlags::X_OK).is_ok();
    let mut tried = Vec::new();
    if let Some(named) = variable.filter(|text| !text.is_empty()).map(PathBuf::from) {
        // Named by hand: anything else would be a surprise.
        tried.push(format!("{PROGRAM_VARIABLE}={}", named.display()));
        return if runs(&named) { Ok(named) } else { Err(StartError::NoProgram { tried }) };
    }
    if let Some(dir) = beside {
        let file = dir.join("sdd");
        if runs(&file) {
            return Ok(file);
        }
        tried.push(file.display().to_string());
    }
    for dir in std::env::split_paths(&path.unwrap_or_default()).filter(|dir| dir.is_absolute()) {
        let file = dir.join("sdd");
        if runs(&file) {
            return Ok(file);
        }
    }
    tried.push("PATH".into());
    Err(StartError::NoProgram { tried })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    fn program(dir: &Path) -> PathBuf {
        let file = dir.join("sdd");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        file
    }

    #[test]
    fn the_program_is_the_named_one_else_the_neighbour_else_the_first_on_the_path() {
        let [named, beside, path] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let on_path = program(path.path());
        let list = Some(path.path().as_os_str().to_owned());
        let find = |variable: Option<&Path>| {
            let variable = variable.map(|file| file.as_os_str().to_owned());
            find_program_in(variable, Some(beside.path().to_owned()), list.clone())
        };
        assert_eq!(find(None).unwrap(), on_path);
        let neighbour = program(beside.path());
        assert_eq!(find(None).unwrap(), neighbour);
        let error = find(Some(&named.path().join("sdd"))).unwrap_err();
        assert!(error.to_string().contains("SDCTL_SDD="), "{error}");
        let by_name = program(named.path());
        assert_eq!(find(Some(&by_name)).unwrap(), by_name);
    }
}
