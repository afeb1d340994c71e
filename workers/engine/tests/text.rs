//! Tokenizer, windows and weights; the tokenizer against transformers' (fixtures/generate_text.py).

use std::{fs, path::PathBuf};

use candle_core::{Device, Tensor};
use sd_engine::text::{
    CHUNK_TOKENS, Chunk, Emphasis, MAX_CHUNKS, TextError, Tokenizer, WINDOW, chunks, equalize, weigh,
};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text").join(name)
}

fn ids() -> serde_json::Value {
    serde_json::from_slice(&fs::read(fixture("ids.json")).unwrap()).unwrap()
}

/// A folder with the small vocabulary and a configuration.
fn folder(config: &serde_json::Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["vocab.json", "merges.txt"] {
        fs::copy(fixture("tokenizer").join(name), folder.path().join(name)).unwrap();
    }
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

fn variant(name: &str) -> Tokenizer {
    Tokenizer::load(folder(&ids()["variants"][name]["config"]).path()).unwrap()
}

fn numbers(value: &serde_json::Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn ids_are_those_of_transformers() {
    let all = ids();
    let prompts: Vec<String> = serde_json::from_value(all["prompts"].clone()).unwrap();
    for (name, expected) in all["variants"].as_object().unwrap() {
        let tokenizer = variant(name);
        for (prompt, ids) in prompts.iter().zip(expected["ids"].as_array().unwrap()) {
            assert_eq!(tokenizer.encode(prompt).unwrap(), numbers(ids), "{name}: {prompt:?}");
        }
        for (prompt, ids) in prompts.iter().zip(expected["padded"].as_array().unwrap()) {
            for emphasis in [Emphasis::WebUi, Emphasis::Off] {
                let windows = chunks(&tokenizer, prompt, emphasis).unwrap();
                assert_eq!(windows.len(), 1);
                assert_eq!(windows[0].ids.to_vec(), numbers(ids), "{name}: {prompt:?} padded");
                assert!(windows[0].is_plain());
            }
        }
    }
}

#[test]
fn one_file_is_as_good_as_two() {
    let all = ids();
    let folder = tempfile::tempdir().unwrap();
    fs::copy(fixture("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    fs::write(folder.path().join("special_tokens_map.json"), r#"{"pad_token": {"content": "!"}}"#).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    assert_eq!((tokenizer.begin(), tokenizer.end(), tokenizer.pad()), (998, 999, 0));
    let prompts: Vec<String> = serde_json::from_value(all["prompts"].clone()).unwrap();
    for (prompt, ids) in prompts.iter().zip(all["variants"]["sd2"]["ids"].as_array().unwrap()) {
        assert_eq!(tokenizer.encode(prompt).unwrap(), numbers(ids), "{prompt:?}");
    }
}

#[test]
fn the_map_of_special_tokens_wins_as_in_transformers() {
    let folder = folder(&ids()["variants"]["sd1"]["config"]);
    fs::write(folder.path().join("special_tokens_map.json"), r#"{"pad_token": "!"}"#).unwrap();
    assert_eq!(Tokenizer::load(folder.path()).unwrap().pad(), 0);
}

/// The error of loading a folder whose file was replaced (removed for `None`).
fn broken(name: &str, content: Option<&str>) -> TextError {
    let folder = folder(&ids()["variants"]["sd1"]["config"]);
    let path = folder.path().join(name);
    match content {
        Some(content) => fs::write(&path, content).unwrap(),
        None => fs::remove_file(&path).unwrap(),
    }
    match Tokenizer::load(folder.path()) {
        Ok(_) => panic!("a broken {name} was accepted"),
        Err(error) => error,
    }
}

#[test]
fn broken_files_are_named() {
    for (name, content, reason) in [
        ("merges.txt", None, "cannot read"),
        ("vocab.json", None, "cannot read"),
        ("vocab.json", Some("{\"a\": "), "EOF"),
        ("vocab.json", Some("{\"a\": 0}"), "vocabulary"),
        ("merges.txt", Some("#version: 0.2\nab\n"), "line 2"),
        ("merges.txt", Some("nonesuch pair\n"), "nonesuch"),
        ("tokenizer_config.json", Some("{\"pad_token\": 3}"), "tokenizer_config.json"),
        ("tokenizer.json", Some("{}"), "tokenizer.json"),
    ] {
        let error = broken(name, content).to_string();
        let named = if content == Some("{\"a\": 0}") { "merges.txt" } else { name };
        assert!(error.contains(named) && error.contains(reason), "{name}: {error}");
    }
    let empty = tempfile::tempdir().unwrap();
    let Err(error) = Tokenizer::load(empty.path()) else { panic!("an empty folder was accepted") };
    assert!(error.to_string().contains("merges.txt"), "{error}");
    let strange = folder(&serde_json::json!({"pad_token": "<nonesuch>"}));
    let Err(error) = Tokenizer::load(strange.path()) else { panic!("a foreign padding was accepted") };
    assert!(error.to_string().contains("<nonesuch>"), "{error}");
}

/// The ids of a window's text.
fn text_of(chunk: &Chunk, tokenizer: &Tokenizer) -> Vec<u32> {
    assert_eq!(chunk.ids[0], tokenizer.begin());
    let end = chunk.ids.iter().position(|&id| id == tokenizer.end()).unwrap();
    assert!(chunk.ids[end + 1..].iter().all(|&id| id == tokenizer.pad()));
    assert!(chunk.weights[end..].iter().all(|&weight| weight == 1.0));
    chunk.ids[1..end].to_vec()
}

fn lengths(windows: &[Chunk], tokenizer: &Tokenizer) -> Vec<usize> {
    windows.iter().map(|chunk| text_of(chunk, tokenizer).len()).collect()
}

/// As many words of one token each.
fn words(n: usize) -> String {
    vec!["a"; n].join(" ")
}

#[test]
fn long_prompts_fill_windows_in_order() {
    let tokenizer = variant("sd2");
    for n in [74, 75, 76, 150, 151, 300] {
        for emphasis in [Emphasis::WebUi, Emphasis::Off] {
            let windows = chunks(&tokenizer, &words(n), emphasis).unwrap();
            assert_eq!(windows.len(), n.div_ceil(CHUNK_TOKENS), "{n}");
            let all: Vec<u32> = windows.iter().flat_map(|chunk| text_of(chunk, &tokenizer)).collect();
            assert_eq!(all, tokenizer.encode(&words(n)).unwrap());
        }
    }
}

#[test]
fn a_cut_goes_back_to_a_near_comma() {
    let tokenizer = variant("sd1");
    let cut = |prompt: &str| lengths(&chunks(&tokenizer, prompt, Emphasis::WebUi).unwrap(), &tokenizer);
    // The comma is token 60 of the window, 15 before its end: what follows it moves.
    assert_eq!(cut(&format!("{}, {}", words(60), words(30))), [61, 30]);
    // Exactly 20 before the end still counts, 21 does not.
    assert_eq!(cut(&format!("{}, {}", words(55), words(30))), [56, 30]);
    assert_eq!(cut(&format!("{}, {}", words(54), words(30))), [75, 10]);
    // A comma that is the window's last token, and one that begins the next.
    assert_eq!(cut(&format!("{}, {}", words(74), words(3))), [75, 3]);
    assert_eq!(cut(&format!("{}, {}", words(75), words(3))), [75, 4]);
    // Off, too.
    let off = chunks(&tokenizer, &format!("{}, {}", words(60), words(30)), Emphasis::Off).unwrap();
    assert_eq!(lengths(&off, &tokenizer), [61, 30]);
}

#[test]
fn breaks_begin_windows() {
    let tokenizer = variant("sd1");
    let cut = |prompt: &str, mode| lengths(&chunks(&tokenizer, prompt, mode).unwrap(), &tokenizer);
    assert_eq!(cut("a BREAK a a", Emphasis::WebUi), [1, 2]);
    assert_eq!(cut("BREAK a", Emphasis::WebUi), [0, 1]);
    assert_eq!(cut("a BREAK BREAK a", Emphasis::WebUi), [1, 0, 1]);
    assert_eq!(cut("a BREAK", Emphasis::WebUi), [1]);
    assert_eq!(cut("a BREAK a", Emphasis::Off).len(), 1);
}

#[test]
fn weights_follow_their_tokens() {
    let tokenizer = variant("sd1");
    let windows = chunks(&tokenizer, "a (a a:1.5) [a]", Emphasis::WebUi).unwrap();
    assert_eq!(windows[0].weights[..6], [1.0, 1.0, 1.5, 1.5, (1.0 / 1.1f64) as f32, 1.0]);
    let off = chunks(&tokenizer, "a (a a:1.5) [a]", Emphasis::Off).unwrap();
    assert!(off[0].is_plain());
    assert_eq!(text_of(&off[0], &tokenizer), tokenizer.encode("a (a a:1.5) [a]").unwrap());
    // Across a cut, moved tokens keep their weights.
    let windows = chunks(&tokenizer, &format!("{}, ({}:2)", words(60), words(30)), Emphasis::WebUi).unwrap();
    assert_eq!(lengths(&windows, &tokenizer), [61, 30]);
    assert!(windows[0].is_plain());
    assert_eq!(windows[1].weights.iter().filter(|&&weight| weight == 2.0).count(), 30);
}

#[test]
fn a_pair_has_as_many_windows() {
    let tokenizer = variant("sd2");
    let mut prompt = chunks(&tokenizer, &words(160), Emphasis::WebUi).unwrap();
    let mut negative = chunks(&tokenizer, "a", Emphasis::WebUi).unwrap();
    equalize(&tokenizer, &mut prompt, &mut negative);
    assert_eq!((prompt.len(), negative.len()), (3, 3));
    assert_eq!(negative[2], Chunk::empty(&tokenizer));
    assert_eq!(negative[2], chunks(&tokenizer, "", Emphasis::Off).unwrap()[0]);
    assert_eq!(negative[2].ids[..4], [998, 999, 0, 0]);
}

#[test]
fn enormous_prompts_are_refused_with_the_limit() {
    let tokenizer = variant("sd1");
    let refused = |prompt: &str| chunks(&tokenizer, prompt, Emphasis::WebUi).unwrap_err().to_string();
    let most = MAX_CHUNKS * CHUNK_TOKENS;
    assert_eq!(chunks(&tokenizer, &words(most), Emphasis::WebUi).unwrap().len(), MAX_CHUNKS);
    let error = refused(&words(most + 1));
    assert!(error.contains("4801") && error.contains("4800"), "{error}");
    assert!(refused(&"BREAK ".repeat(100)).contains("windows"));
    assert!(refused(&"a".repeat(1 << 20)).contains("bytes"));
}

fn encoding(windows: usize) -> Tensor {
    let values: Vec<f32> = (0..windows * WINDOW * 4).map(|i| (i as f32 * 0.37).sin() + 0.5).collect();
    Tensor::from_vec(values, (windows, WINDOW, 4), &Device::Cpu).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn weighing_keeps_each_windows_mean_and_leaves_plain_ones_alone() {
    let tokenizer = variant("sd1");
    let plain = chunks(&tokenizer, &words(100), Emphasis::WebUi).unwrap();
    let hidden = encoding(2);
    assert_eq!(flat(&weigh(&hidden, &plain).unwrap()), flat(&hidden));

    let mixed = chunks(&tokenizer, &format!("a (a:1.5) a BREAK {}", words(3)), Emphasis::WebUi).unwrap();
    let weighed = flat(&weigh(&hidden, &mixed).unwrap());
    let before = flat(&hidden);
    let size = WINDOW * 4;
    assert_eq!(weighed[size..], before[size..]);
    let mean = |values: &[f32]| values.iter().sum::<f32>() / values.len() as f32;
    assert!((mean(&weighed[..size]) - mean(&before[..size])).abs() < 1e-5);
    // All but the emphasized token are scaled alike, and that one half as much again.
    let scale = weighed[0] / before[0];
    for (i, (after, before)) in weighed[..size].iter().zip(&before).enumerate() {
        let expected = if i / 4 == 2 { 1.5 * scale } else { scale };
        assert!((after - before * expected).abs() < 1e-5, "value {i}");
    }
    assert!(scale < 1.0);
}

#[test]
fn foreign_encodings_are_refused() {
    let tokenizer = variant("sd1");
    let windows = chunks(&tokenizer, "(a)", Emphasis::WebUi).unwrap();
    let error = weigh(&encoding(2), &windows).unwrap_err().to_string();
    assert!(error.contains("[2, 77, 4]"), "{error}");
}
