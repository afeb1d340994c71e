//! `sd-worker` as a program: what it says when it is called wrongly or by hand.

use std::process::{Command, Output};

use sd_proto::exit::WorkerExit;

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sd-worker")).args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn help_and_mistakes_have_their_exit_codes() {
    assert!(run(&["--help"]).status.success());
    for wrong in [&["serve"][..], &["serve", "--stage", "audio"], &["paint"], &[]] {
        assert_eq!(run(wrong).status.code(), Some(WorkerExit::BadArguments.code()), "{wrong:?}");
    }
}

#[test]
fn a_worker_started_by_hand_says_who_starts_it() {
    let arguments = ["serve", "--socket", "/nowhere", "--incarnation", "1", "--stage", "text", "--model", "/nowhere"];
    let output = run(&arguments);
    assert_eq!(output.status.code(), Some(WorkerExit::BadArguments.code()), "{}", said(&output));
    assert!(said(&output).contains("started by sdd"), "{}", said(&output));
}

#[test]
fn inspecting_what_is_no_model_names_the_folder_and_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let output = run(&["inspect", path]);
    assert_eq!(output.status.code(), Some(WorkerExit::BadWeights.code()));
    assert!(said(&output).contains(path) && said(&output).contains("model_index.json"), "{}", said(&output));
}
