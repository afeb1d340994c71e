//! What the workspace promises about its parts: which crates do their work, and who may depend on what.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, PackageId};
use sd_tests::programs::repository;

fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(repository().join("Cargo.toml"))
        .other_options(
            ["--offline", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"].map(String::from).to_vec(),
        )
        .exec()
        .expect("cargo metadata")
}

/// All packages that the shipped programs of `package` are built from, dependencies of dependencies included.
fn closure(metadata: &Metadata, package: &str) -> BTreeSet<String> {
    let resolve = metadata.resolve.as_ref().expect("a resolved graph");
    let nodes: BTreeMap<&PackageId, _> = resolve.nodes.iter().map(|node| (&node.id, node)).collect();
    let start = &metadata.packages.iter().find(|p| p.name.as_str() == package).expect("the package").id;
    let (mut queue, mut seen) = (vec![start], BTreeSet::new());
    while let Some(id) = queue.pop() {
        if !seen.insert(id) {
            continue;
        }
        let normal = |dep: &&cargo_metadata::NodeDep| dep.dep_kinds.iter().any(|k| k.kind == DependencyKind::Normal);
        queue.extend(nodes[id].deps.iter().filter(normal).map(|dep| &dep.pkg));
    }
    metadata.packages.iter().filter(|p| seen.contains(&p.id)).map(|p| p.name.to_string()).collect()
}

#[test]
fn what_the_user_asked_for_is_used_directly_where_it_does_its_work() {
    let metadata = metadata();
    let direct: BTreeMap<String, BTreeSet<String>> = metadata
        .workspace_packages()
        .iter()
        .map(|package| {
            let normal = package.dependencies.iter().filter(|dep| dep.kind == DependencyKind::Normal);
            (package.name.to_string(), normal.map(|dep| dep.name.clone()).collect())
        })
        .collect();
    for (package, needed) in [
        ("sdd", &["tokio", "tonic", "prost", "shared_memory", "nix", "serde", "tracing"][..]),
        ("sd-worker", &["tokio", "tonic", "shared_memory", "safetensors", "tracing"]),
        ("sd-engine", &["candle-core", "safetensors", "memmap2", "serde"]),
        ("sd-client", &["tokio", "tonic", "nix"]),
        ("sd-proto", &["tonic", "prost", "nix"]),
    ] {
        for name in needed {
            assert!(direct[package].contains(*name), "{package} does not depend on {name} directly");
        }
    }
}

#[test]
fn neither_daemon_nor_client_contains_tensors_or_model_code() {
    let metadata = metadata();
    for program in ["sdd", "sd-client", "sd-proto"] {
        let packages = closure(&metadata, program);
        for banned in ["candle-core", "candle-nn", "sd-engine", "safetensors", "tokenizers", "cudarc", "gemm"] {
            assert!(!packages.contains(banned), "{program} depends on {banned}");
        }
    }
    let engine = closure(&metadata, "sd-engine");
    for banned in ["tonic", "prost", "sd-proto", "tokio"] {
        assert!(!engine.contains(banned), "the engine depends on {banned}");
    }
}

#[test]
fn versions_are_written_once_in_the_workspace() {
    for member in ["proto", "daemon", "workers/engine", "workers/worker", "client", "models", "tests"] {
        let path = repository().join(member).join("Cargo.toml");
        let text = std::fs::read_to_string(&path).expect("a manifest");
        let mut section = String::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('[') {
                section = name.trim_end_matches(']').to_owned();
            } else if section.ends_with("dependencies") && line.contains('=') {
                let own_path = line.contains("path = \".\"") && !line.contains("version");
                let once = line.contains("workspace = true") || own_path;
                assert!(once, "{}: `{line}` states a version of its own", path.display());
            }
        }
    }
}

/// SPECIFICATION.md names a test for every promise; a test that is renamed or removed must not leave its promise behind.
#[test]
fn every_test_that_the_specification_names_exists() {
    let page = std::fs::read_to_string(repository().join("SPECIFICATION.md")).expect("the specification");
    let mut path = String::new();
    let mut named = 0;
    for reference in page.split('`').skip(1).step_by(2).filter(|text| text.contains("::")) {
        let (file, test) = reference.rsplit_once("::").expect("a test's name");
        if file.ends_with(".rs") {
            path = file.to_owned();
        } else if file != "…" {
            continue;
        }
        let source = std::fs::read_to_string(repository().join(&path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        assert!(source.contains(&format!("fn {test}(")), "{path} has no test {test}");
        named += 1;
    }
    assert!(named > 150, "only {named} tests are named");
}
