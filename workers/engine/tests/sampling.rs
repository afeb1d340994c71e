//! Samplers and schedules against diffusers' (fixtures/generate_sampling.py).

use std::collections::BTreeSet;

use candle_core::{Device, Tensor};
use safetensors::SafeTensors;
use sd_engine::sampling::{
    Generator, History, NoiseSource, Sampler, SamplerKind, SamplerRequest, SamplingError, SchedulerConfig, build,
};
use serde::Deserialize;

/// Of the largest magnitude in a sample.
const TOLERANCE: f32 = 1e-5;
/// The same where a zero-terminal schedule begins at a noise level of 4096, where single precision holds few digits of the
/// original, there as here.
const TOLERANCE_ZERO_SNR: f32 = 1e-4;
/// The same for Heun, which divides differences of such samples by small noise levels. diffusers does not offer it.
const TOLERANCE_ZERO_SNR_HEUN: f32 = 2e-3;
const SHAPE: (usize, usize, usize, usize) = (1, 4, 2, 3);

#[derive(Deserialize)]
struct Case {
    sampler: String,
    config: serde_json::Value,
    schedule: String,
    zero_snr: Option<bool>,
    steps: usize,
    strength: Option<f64>,
    eta: f64,
    seed: u64,
    first: usize,
    keep: Vec<usize>,
    blend: bool,
}

impl Case {
    fn config(&self) -> SchedulerConfig {
        SchedulerConfig::from_json(&self.config.to_string()).unwrap()
    }

    fn request(&self) -> SamplerRequest {
        let mut schedule: sd_engine::sampling::ScheduleChoice = self.schedule.parse().unwrap();
        schedule.zero_snr = self.zero_snr;
        SamplerRequest {
            sampler: Some(self.sampler.parse().unwrap()),
            schedule,
            steps: self.steps,
            strength: self.strength,
            eta: self.eta,
        }
    }

    fn name(&self, number: usize) -> String {
        format!(
            "case {number}: {} {} zero_snr {:?} {} steps strength {:?} eta {} {}",
            self.sampler, self.schedule, self.zero_snr, self.steps, self.strength, self.eta, self.config
        )
    }
}

fn read(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/sampling/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn cases() -> Vec<Case> {
    serde_json::from_slice(&read("cases.json")).unwrap()
}

fn values(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let view = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest difference in units of the largest magnitude.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    let far = found
        .iter()
        .zip(expected)
        .fold(0f32, |m, (a, b)| if (a - b).is_nan() { f32::NAN } else { m.max((a - b).abs()) });
    far / largest
}

/// The generator script's model.
fn model(input: &Tensor, timestep: f64) -> Tensor {
    let values: Vec<f32> = flat(input)
        .iter()
        .enumerate()
        .map(|(i, x)| 0.3 * x + 0.1 * ((timestep / 100.0) as f32 + i as f32).sin())
        .collect();
    Tensor::from_vec(values, input.shape(), input.device()).unwrap()
}

fn original() -> Tensor {
    let values: Vec<f32> = (0..24).map(|i| 0.5 * (i as f32).cos()).collect();
    Tensor::from_vec(values, SHAPE, &Device::Cpu).unwrap()
}

/// The first noise and the sample made of it.
fn begin(sampler: &dyn Sampler, case: &Case, generator: &mut Generator) -> (Tensor, Tensor) {
    let noise = generator.noise_like(&original()).unwrap();
    let sample = match case.strength {
        None => (&noise * sampler.init_noise_sigma()).unwrap(),
        Some(_) => sampler.add_noise(&original(), &noise, sampler.start()).unwrap(),
    };
    (noise, sample)
}

/// Inpainting's blend: of each channel's two rows, the second is the original at this call's noise level.
fn blended(sampler: &dyn Sampler, sample: &Tensor, noise: &Tensor, index: usize) -> Tensor {
    let noised = sampler.add_noise(&original(), noise, index).unwrap();
    Tensor::cat(&[sample.narrow(2, 0, 1).unwrap(), noised.narrow(2, 1, 1).unwrap()], 2).unwrap()
}

fn advance(sampler: &mut dyn Sampler, index: usize, sample: &Tensor, noise: &mut dyn NoiseSource) -> Tensor {
    let input = sampler.scale_model_input(sample, index).unwrap();
    let output = model(&input, sampler.timesteps()[index]);
    sampler.step(&output, index, sample, noise).unwrap()
}

#[test]
fn every_case_follows_diffusers() {
    let bytes = read("cases.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (mut worst, mut seen, mut failures) = (0f32, BTreeSet::new(), Vec::new());
    for (number, case) in cases().iter().enumerate() {
        let name = case.name(number);
        let mut sampler = build(&case.config(), &case.request()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let timesteps: Vec<f32> = sampler.timesteps().iter().map(|&t| t as f32).collect();
        let expected = values(&file, &format!("{number}.timesteps"));
        let near = timesteps.len() == expected.len()
            && timesteps.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(1.0));
        if !near {
            failures.push(format!("{name}: timesteps {timesteps:?}, diffusers has {expected:?}"));
            continue;
        }
        assert_eq!(sampler.start(), case.first, "{name}");
        let mut generator = Generator::new(case.seed);
        let (noise, first) = begin(sampler.as_ref(), case, &mut generator);
        let mut samples = vec![first];
        for index in sampler.start()..sampler.timesteps().len() {
            let mut sample = samples[samples.len() - 1].clone();
            if case.blend && samples.len() > 1 {
                sample = blended(sampler.as_ref(), &sample, &noise, index);
            }
            let next = advance(sampler.as_mut(), index, &sample, &mut generator);
            samples.push(next);
        }
        assert_eq!(samples.len(), 1 + sampler.model_calls(), "{name}");
        let expected = values(&file, &format!("{number}.samples"));
        for (&keep, expected) in case.keep.iter().zip(expected.chunks_exact(24)) {
            let far = difference(&flat(&samples[keep]), expected);
            let allowed = match (case.zero_snr, case.sampler.as_str()) {
                (Some(true), "heun") => TOLERANCE_ZERO_SNR_HEUN,
                (Some(true), _) => TOLERANCE_ZERO_SNR,
                _ => TOLERANCE,
            };
            worst = worst.max(far / allowed);
            if far.is_nan() || far > allowed {
                failures.push(format!("{name}: after {keep} calls off by {far:e}"));
                break;
            }
        }
        seen.insert(case.sampler.clone());
    }
    println!("largest difference {worst} of what is allowed");
    assert!(failures.is_empty(), "{} cases differ:\n{}", failures.len(), failures.join("\n"));
    assert_eq!(seen.len(), SamplerKind::ALL.len(), "{seen:?}");
}

/// Stopped after every call and restored from what a checkpoint keeps, a run ends with the same bits.
#[test]
fn a_restored_run_is_the_undisturbed_run() {
    let all = cases();
    let picked: Vec<&Case> = SamplerKind::ALL
        .iter()
        .flat_map(|kind| {
            let of_kind = move |case: &&Case| case.sampler == kind.name() && case.steps >= 5;
            let thorough = |case: &&Case| case.config.get("solver_order") == Some(&3.into()) || case.eta > 0.0;
            let first = all.iter().find(of_kind);
            let other = all.iter().filter(of_kind).find(thorough);
            first.into_iter().chain(other)
        })
        .collect();
    assert!(picked.len() >= SamplerKind::ALL.len() + 4);
    for case in picked {
        let mut sampler = build(&case.config(), &case.request()).unwrap();
        let mut generator = Generator::new(case.seed);
        let (_, mut sample) = begin(sampler.as_ref(), case, &mut generator);
        let (mut other_generator, mut other) = (generator.clone(), sample.clone());
        let mut stored = serde_json::to_string(&sampler.history().unwrap()).unwrap();
        for index in sampler.start()..sampler.timesteps().len() {
            sample = advance(sampler.as_mut(), index, &sample, &mut generator);
            let mut fresh = build(&case.config(), &case.request()).unwrap();
            let history: History = serde_json::from_str(&stored).unwrap();
            fresh.restore(&history, &Device::Cpu).unwrap();
            let mut restored = serde_json::from_str(&serde_json::to_string(&other_generator).unwrap()).unwrap();
            other = advance(fresh.as_mut(), index, &other, &mut restored);
            other_generator = restored;
            stored = serde_json::to_string(&fresh.history().unwrap()).unwrap();
            assert_eq!(flat(&sample), flat(&other), "{} after call {index}", case.sampler);
        }
        assert_eq!(generator, other_generator, "{}", case.sampler);
    }
}

/// Noise that was recorded, in order.
struct Recorded(std::vec::IntoIter<Vec<f32>>);

impl NoiseSource for Recorded {
    fn noise_like(&mut self, sample: &Tensor) -> Result<Tensor, SamplingError> {
        let values = self.0.next().ok_or_else(|| SamplingError::State("more noise was drawn than recorded".into()))?;
        Ok(Tensor::from_vec(values, sample.shape(), sample.device())?)
    }
}

/// A slice of the recorded pipelines: guidance, model input, timesteps and the latents after every step.
#[test]
fn recorded_pipelines_are_followed() {
    let bytes = read("pipelines.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let base = r#""beta_start":0.00085,"beta_end":0.012,"beta_schedule":"scaled_linear","steps_offset":1"#;
    for (name, class, extra) in [
        ("sd15", "DDIMScheduler", r#""clip_sample":false,"set_alpha_to_one":false,"timestep_spacing":"leading""#),
        ("sd15_euler", "EulerDiscreteScheduler", r#""timestep_spacing":"linspace""#),
        ("sd15_lcm", "LCMScheduler", r#""set_alpha_to_one":true,"original_inference_steps":50"#),
        ("sd21", "DDIMScheduler", r#""clip_sample":false,"set_alpha_to_one":false,"prediction_type":"v_prediction""#),
    ] {
        let config = SchedulerConfig::from_json(&format!(r#"{{"_class_name":"{class}",{base},{extra}}}"#)).unwrap();
        let mut sampler = build(&config, &SamplerRequest::new(4)).unwrap();
        let timesteps: Vec<f32> = sampler.timesteps().iter().map(|&t| t as f32).collect();
        assert_eq!(timesteps, values(&file, &format!("{name}.timesteps")), "{name}");
        let begin = values(&file, &format!("{name}.begin"));
        let mut sample = Tensor::new(begin, &Device::Cpu).unwrap();
        let noises: Vec<Vec<f32>> = (0..4)
            .map(|i| format!("{name}.noise.{i}"))
            .filter(|n| file.tensor(n).is_ok())
            .map(|n| values(&file, &n))
            .collect();
        let drawn = noises.len();
        assert_eq!(drawn, if name == "sd15_lcm" { 3 } else { 0 });
        let mut noise = Recorded(noises.into_iter());
        for index in 0..4 {
            let input = flat(&sampler.scale_model_input(&sample, index).unwrap());
            let recorded = values(&file, &format!("{name}.in.{index}"));
            assert!(difference(&input, &recorded[..64]) <= TOLERANCE, "{name}: input {index}");
            // Without guidance there is one image in the batch, with it the second is the prompt's.
            let output = values(&file, &format!("{name}.out.{index}"));
            let guided: Vec<f32> = match output.split_at(64) {
                (only, []) => only.to_vec(),
                (without, with) => without.iter().zip(with).map(|(u, c)| u + 7.5 * (c - u)).collect(),
            };
            let guided = Tensor::new(guided, &Device::Cpu).unwrap();
            sample = sampler.step(&guided, index, &sample, &mut noise).unwrap();
            let far = difference(&flat(&sample), &values(&file, &format!("{name}.latents.{index}")));
            assert!(far <= TOLERANCE, "{name}: latents {index} off by {far:e}");
        }
    }
}

fn latent_config() -> SchedulerConfig {
    SchedulerConfig::from_json(
        r#"{"_class_name":"PNDMScheduler","beta_start":0.00085,"beta_end":0.012,"beta_schedule":"scaled_linear","steps_offset":1}"#,
    )
    .unwrap()
}

fn refusal(config: &SchedulerConfig, request: &SamplerRequest) -> String {
    match build(config, request) {
        Ok(_) => panic!("{request:?} was accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn requests_without_meaning_are_refused_with_the_limit() {
    let config = latent_config();
    let request = SamplerRequest::new;
    assert!(refusal(&config, &request(0)).contains("at least 1"));
    assert!(refusal(&config, &request(1001)).contains("1000"));
    let lcm = SamplerRequest { sampler: Some(SamplerKind::Lcm), ..request(51) };
    assert!(refusal(&config, &lcm).contains("50"));
    let repeated = SamplerRequest { schedule: "karras".parse().unwrap(), steps: 50, ..lcm.clone() };
    assert!(refusal(&config, &repeated).contains("repeats"));
    assert!(refusal(&config, &SamplerRequest { strength: Some(0.01), ..request(20) }).contains("leaves none"));
    assert!(refusal(&config, &SamplerRequest { eta: 1.5, ..request(20) }).contains("eta"));
    // Pure noise at the first step says nothing to a model that predicts noise.
    let terminal = SamplerRequest {
        sampler: Some(SamplerKind::Ddim),
        schedule: "trailing+zero_snr".parse().unwrap(),
        ..request(10)
    };
    assert!(refusal(&config, &terminal).contains("v prediction"));
    let flow = SchedulerConfig::from_json(r#"{"_class_name":"FlowMatchEulerDiscreteScheduler"}"#).unwrap();
    assert!(refusal(&flow, &request(10)).contains("FlowMatchEulerDiscreteScheduler"));
}

#[test]
fn a_scheduler_without_a_sampler_here_has_a_stand_in() {
    let sampler = build(&latent_config(), &SamplerRequest::new(10)).unwrap();
    assert_eq!(sampler.kind(), SamplerKind::Dpmpp2m);
}

#[test]
fn states_of_another_sampler_or_of_another_shape_are_refused() {
    let config = latent_config();
    let of = |kind| build(&config, &SamplerRequest { sampler: Some(kind), ..SamplerRequest::new(6) }).unwrap();
    let sample = original();
    let mut generator = Generator::new(1);
    for kind in [SamplerKind::Heun, SamplerKind::Dpmpp2m, SamplerKind::Unipc] {
        let mut sampler = of(kind);
        advance(sampler.as_mut(), 0, &sample, &mut generator);
        let history = sampler.history().unwrap();
        assert_ne!(history, History::None);
        for other in SamplerKind::ALL {
            let same = other == kind || (kind == SamplerKind::Dpmpp2m && other == SamplerKind::Dpmpp2mSde);
            assert_eq!(of(other).restore(&history, &Device::Cpu).is_ok(), same, "{kind} into {other}");
        }
    }
    let wrong = Tensor::zeros((1, 4, 2, 2), candle_core::DType::F32, &Device::Cpu).unwrap();
    for kind in SamplerKind::ALL {
        let error = of(kind).step(&wrong, 0, &sample, &mut generator).unwrap_err().to_string();
        assert!(error.contains("[1, 4, 2, 2]"), "{kind}: {error}");
    }
    // Heun's second call needs its first.
    assert!(of(SamplerKind::Heun).step(&sample, 1, &sample, &mut generator).is_err());
}
