//! Walks `default/` and writes the table of embedded files and their content hash into `OUT_DIR/table.rs`.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

fn main() -> io::Result<()> {
    let manifest = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let root = manifest.join("default");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=default");

    let mut files = Vec::new();
    collect(&root, &root, &mut files)?;
    // The table and the hash must not depend on the order in which the file system lists names.
    files.sort();
    if !files.iter().any(|(name, _)| name == "model_index.json") {
        println!(
            "cargo::error={} holds no model_index.json: the default model is part of the repository, check it out again",
            root.display()
        );
        return Ok(());
    }

    let mut hash = Fnv::new();
    let mut table = String::from("pub(crate) const FILES: &[(&str, &[u8])] = &[\n");
    for (name, path) in &files {
        let bytes = fs::read(path)?;
        hash.update(name.as_bytes());
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(&bytes);
        writeln!(table, "    ({name:?}, include_bytes!({:?})),", path.display().to_string())
            .expect("writing to a string");
    }
    writeln!(table, "];\npub(crate) const ID: &str = \"{:012x}\";", hash.0 >> 16).expect("writing to a string");

    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(out.join("table.rs"), table)
}

/// Adds every regular file below `dir` as (path relative to `root` with `/`, absolute path).
fn collect(root: &Path, dir: &Path, files: &mut Vec<(String, PathBuf)>) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        // `main` reports the missing folder with its remedy.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            collect(root, &path, files)?;
        } else {
            let relative = path.strip_prefix(root).expect("entries lie below the root");
            let parts: Vec<_> = relative.iter().map(|part| part.to_str().expect("file names are UTF-8")).collect();
            files.push((parts.join("/"), path));
        }
    }
    Ok(())
}

/// FNV-1a, 64 bits: enough to tell one build's model from another's; not a defence against an adversary.
struct Fnv(u64);

impl Fnv {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}
