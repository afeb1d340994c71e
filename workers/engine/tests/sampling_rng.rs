//! The random generator against torch's (fixtures/generate_sampling.py).

use safetensors::SafeTensors;
use sd_engine::sampling::Generator;

fn fixture() -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/sampling/rng.safetensors");
    std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn values(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = file.tensor(name).unwrap();
    bytes.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Steps between two floats of one sign; values of this generator are never so near zero that signs could differ.
fn ulps(a: f32, b: f32) -> u32 {
    assert_eq!(a.is_sign_negative(), b.is_sign_negative(), "{a} {b}");
    a.to_bits().abs_diff(b.to_bits())
}

fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&a, &b)) in found.iter().zip(expected).enumerate() {
        assert!(ulps(a, b) <= 2, "{what}: value {i} is {a}, torch has {b}");
    }
}

fn number(name: &str, part: usize) -> u64 {
    name.split('.').nth(part).unwrap().parse().unwrap()
}

#[test]
fn every_size_and_seed_gives_torchs_values() {
    let bytes = fixture();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut seen = 0;
    for name in file.names() {
        let expected = values(&file, name);
        if name.starts_with("randn.") {
            let found = Generator::new(number(name, 1)).randn(number(name, 2) as usize);
            assert_near(&found, &expected, name);
        } else if name.starts_with("rand.") {
            assert_eq!(Generator::new(number(name, 1)).rand(expected.len()), expected, "{name}");
        } else if name.starts_with("slice.") {
            let n = number(name, 2) as usize;
            let all = Generator::new(number(name, 1)).randn(n);
            let found = [&all[..16], &all[n / 2..n / 2 + 16], &all[n - 32..]].concat();
            assert_near(&found, &expected, name);
        } else {
            continue;
        }
        seen += 1;
    }
    assert_eq!(seen, 7 * 11 + 4);
}

#[test]
fn block_values_are_torchs_bit_for_bit() {
    let bytes = fixture();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (seed, n) in [(3, 4096), (4, 4099), (5, 16384), (6, 65535)] {
        let all = Generator::new(seed).randn(n);
        let found = [&all[..16], &all[n / 2..n / 2 + 16], &all[n - 32..]].concat();
        assert_eq!(found, values(&file, &format!("slice.{seed}.{n}")));
    }
}

#[test]
fn calls_of_mixed_sizes_go_on_where_torch_goes_on() {
    let bytes = fixture();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for seed in [7, (1 << 40) + 1] {
        let mut generator = Generator::new(seed);
        for (i, n) in [3, 16, 2, 1, 17, 5, 700, 15, 1, 33, 4, 1300, 7].into_iter().enumerate() {
            // Through its stored form before every call: a resumed job must draw what the undisturbed one draws.
            let stored = serde_json::to_string(&generator).unwrap();
            generator = serde_json::from_str(&stored).unwrap();
            let found = generator.randn(n);
            let tail = &found[n.saturating_sub(if n < 100 { n } else { 40 })..];
            let name = format!("sequence.{seed}.{i}.{n}");
            assert_near(tail, &values(&file, &name), &name);
        }
    }
}

#[test]
fn only_the_low_half_of_a_seed_counts() {
    assert_eq!(Generator::new(7), Generator::new((5 << 32) + 7));
    assert_ne!(Generator::new(7), Generator::new(8));
}

#[test]
fn damaged_states_are_refused() {
    let stored = serde_json::to_value(Generator::new(1)).unwrap();
    let mut short = stored.clone();
    short["words"].as_array_mut().unwrap().pop();
    let error = serde_json::from_value::<Generator>(short).unwrap_err().to_string();
    assert!(error.contains("624") && error.contains("623"), "{error}");
    let mut far = stored;
    far["next"] = 625.into();
    assert!(serde_json::from_value::<Generator>(far).is_err());
}
