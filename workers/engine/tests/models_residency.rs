//! Residency: what is resident, streamed or given back in mid-run never changes a result, and bytes are what was declared.

use std::ops::ControlFlow;

use anyhow::Result;
use candle_core::Tensor;
use sd_engine::models::{AutoencoderKl, AutoencoderKlConfig, ClipTextModel, ModelError, Unet, UnetConfig, VaeHalf};
use sd_engine::residency::{LoadEvent, Residency, Role, SegmentEvent, Uninterrupted};
use sd_engine::testkit::{Fixture, compare};

fn proceed(_: &LoadEvent<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

struct Prepared {
    fixture: Fixture,
    folder: tempfile::TempDir,
}

impl Prepared {
    fn new() -> Result<Self> {
        let fixture = Fixture::open("sd15")?;
        let folder = tempfile::tempdir()?;
        fixture.write_model(folder.path())?;
        Ok(Self { fixture, folder })
    }

    fn unet(&self) -> Result<Unet> {
        Ok(Unet::open(&self.folder.path().join("unet"))?)
    }

    fn step(&self, unet: &Unet, observer: &mut dyn sd_engine::residency::Observer) -> Result<Tensor, ModelError> {
        let input = |key: &str| self.fixture.tensor(key).map_err(|e| ModelError::Input(e.to_string()));
        let mut run = unet.begin(input("unet.0.in.encoder_hidden_states")?, None)?;
        run.forward(input("unet.0.in.0")?, 751.0, observer)
    }
}

#[test]
fn streamed_partly_and_wholly_resident_give_the_same_bytes() -> Result<()> {
    let prepared = Prepared::new()?;
    let unet = prepared.unet()?;
    let total = unet.residency().total_bytes();
    let mut results = Vec::new();
    for limit in [0, total / 2, u64::MAX] {
        unet.residency().set_limit(limit);
        unet.residency().load(&mut proceed)?;
        let resident = unet.bytes();
        assert!(resident <= limit, "{resident} bytes are resident under a limit of {limit}");
        let mut seen = (0, 0);
        let mut observer = |event: &SegmentEvent<'_>| {
            if event.resident {
                seen.0 += 1
            } else {
                seen.1 += 1
            }
            ControlFlow::Continue(())
        };
        results.push(prepared.step(&unet, &mut observer)?);
        let all = unet.residency().segments().len();
        assert_eq!(seen.0 + seen.1, all);
        match limit {
            0 => assert_eq!((resident, seen.0), (0, 0), "nothing is resident"),
            u64::MAX => assert_eq!((resident, seen.1), (total, 0), "nothing is streamed"),
            _ => assert!(seen.0 > 2 && seen.1 > 2 && resident > total / 3, "{seen:?}, {resident} of {total}"),
        }
        assert_eq!(unet.bytes(), resident, "a run leaves residency as it was");
    }
    for other in &results[1..] {
        assert_eq!(compare(other, &results[0])?, 0.0);
    }
    Ok(())
}

#[test]
fn memory_is_given_back_at_the_next_segment_of_a_run() -> Result<()> {
    let prepared = Prepared::new()?;
    let unet = prepared.unet()?;
    unet.residency().set_limit(u64::MAX);
    unet.residency().load(&mut proceed)?;
    let undisturbed = prepared.step(&unet, &mut Uninterrupted)?;
    let total = unet.residency().total_bytes();
    let mut after = Vec::new();
    let mut observer = |event: &SegmentEvent<'_>| {
        if event.index == 5 {
            unet.residency().set_limit(total / 4);
        }
        if event.index == 6 {
            after.push(unet.bytes());
        }
        ControlFlow::Continue(())
    };
    let revised = prepared.step(&unet, &mut observer)?;
    assert_eq!(compare(&revised, &undisturbed)?, 0.0);
    assert_eq!(after.len(), 1);
    assert!(after[0] <= total / 4, "{} of {total} bytes were kept", after[0]);
    unet.residency().unload();
    assert_eq!(unet.bytes(), 0);
    Ok(())
}

#[test]
fn declared_bytes_are_bound_bytes() -> Result<()> {
    let prepared = Prepared::new()?;
    let folder = prepared.folder.path();
    let check = |residency: &Residency, what: &str| -> Result<()> {
        residency.set_limit(u64::MAX);
        let mut last = (0, 0);
        residency.load(&mut |event: &LoadEvent<'_>| {
            assert!(event.done > last.0 && event.done <= event.total, "{what}: {event:?} after {last:?}");
            last = (event.done, event.total);
            ControlFlow::Continue(())
        })?;
        assert_eq!(last.0, last.1, "{what}: progress ends at its total");
        assert_eq!(residency.resident_bytes(), residency.total_bytes(), "{what}");
        assert!(residency.total_bytes() > 10_000, "{what}");
        Ok(())
    };
    check(ClipTextModel::open(&folder.join("text_encoder"))?.residency(), "text encoder")?;
    check(Unet::open(&folder.join("unet"))?.residency(), "unet")?;
    let vae = AutoencoderKl::open(&folder.join("vae"))?;
    check(vae.residency(VaeHalf::Decoder), "decoder")?;
    check(vae.residency(VaeHalf::Encoder), "encoder")
}

#[test]
fn a_run_and_a_load_can_be_cancelled_at_every_segment() -> Result<()> {
    let prepared = Prepared::new()?;
    let unet = prepared.unet()?;
    let count = unet.residency().segments().len();
    for stop in [0, 1, count / 2, count - 1] {
        let mut seen = 0;
        let mut observer = |event: &SegmentEvent<'_>| {
            seen += 1;
            if event.index == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let error = prepared.step(&unet, &mut observer);
        assert!(matches!(error, Err(ModelError::Cancelled { .. })), "{error:?}");
        assert_eq!(seen, stop + 1, "nothing runs after a cancel");
    }
    let mut loads = 0;
    unet.residency().set_limit(u64::MAX);
    let stopped = unet.residency().load(&mut |_: &LoadEvent<'_>| {
        loads += 1;
        if loads == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(stopped.is_err() && loads == 3);
    assert!(unet.bytes() > 0 && unet.bytes() < unet.residency().total_bytes());
    Ok(())
}

#[test]
fn models_are_fine_grained() -> Result<()> {
    let prepared = Prepared::new()?;
    let folder = prepared.folder.path();
    let unet = Unet::declarations(&UnetConfig::read(&folder.join("unet/config.json"))?);
    let roles = |role| unet.iter().filter(|d| d.role() == role).count();
    assert_eq!((roles(Role::Prelude), roles(Role::Epilogue)), (1, 1));
    // Two layers down, three up on three levels, two in the middle, two changes of resolution each way.
    assert_eq!(roles(Role::Block), 3 * 2 + 3 * 3 + 2 + 2 + 2);
    let vae = AutoencoderKlConfig::read(&folder.join("vae/config.json"))?;
    // An upsampler is a part of the layer that follows it.
    assert_eq!(AutoencoderKl::declarations(&vae, VaeHalf::Decoder).len(), 1 + 2 + 4 * 2 + 1);
    Ok(())
}

#[test]
fn inputs_that_do_not_fit_are_refused_with_both_numbers() -> Result<()> {
    let prepared = Prepared::new()?;
    let folder = prepared.folder.path();
    let says = |error: Result<(), ModelError>, words: &[&str]| {
        let text = error.map_or_else(|e| e.to_string(), |()| "no error".into());
        assert!(words.iter().all(|w| text.contains(w)), "{text} lacks one of {words:?}");
    };
    let text = ClipTextModel::open(&folder.join("text_encoder"))?;
    says(text.forward(&[vec![1; 78]], 0, &mut Uninterrupted).map(drop), &["78", "77"]);
    says(text.forward(&[vec![5000]], 0, &mut Uninterrupted).map(drop), &["5000", "1000"]);
    says(text.forward(&[vec![1], vec![1, 2]], 0, &mut Uninterrupted).map(drop), &["one length"]);
    says(text.forward(&[vec![1]], 3, &mut Uninterrupted).map(drop), &["clip skip 3", "3 layers"]);
    let device = candle_core::Device::Cpu;
    let zeros = |shape: &[usize]| Tensor::zeros(shape, candle_core::DType::F32, &device);
    let unet = prepared.unet()?;
    says(unet.begin(&zeros(&[1, 77, 48])?, None).map(drop), &["48", "32"]);
    let mut run = unet.begin(&zeros(&[1, 77, 32])?, None)?;
    says(run.forward(&zeros(&[1, 9, 8, 8])?, 1.0, &mut Uninterrupted).map(drop), &["9 channels", "4"]);
    says(run.forward(&zeros(&[2, 4, 8, 8])?, 1.0, &mut Uninterrupted).map(drop), &["[2, 4, 8, 8]", "[1, 77, 32]"]);
    let vae = AutoencoderKl::open(&folder.join("vae"))?;
    says(vae.encode(&zeros(&[1, 3, 60, 64])?, &mut Uninterrupted).map(drop), &["60", "multiples of 8"]);
    says(vae.decode(&zeros(&[1, 3, 8, 8])?, &mut Uninterrupted).map(drop), &["4 channels"]);
    Ok(())
}
