//! Residency: what is resident, streamed or given back in mid-run never changes a result, and bytes are what was declared.

use std::ops::ControlFlow;

use anyhow::Result;
use candle_core::Tensor;
use sd_engine::models::{AutoencoderKl, AutoencoderKlConfig, ClipTextModel, ModelError, Unet, UnetConfig, VaeHalf};
use sd_engine::ops::Chunks;
use sd_engine::residency::{LoadEvent, Policy, Residency, Role, SegmentEvent, Storage, Uninterrupted};
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

fn policy(prefetch: bool) -> Policy {
    Policy { prefetch, ..Policy::default() }
}

#[test]
fn streamed_partly_and_wholly_resident_give_the_same_bytes() -> Result<()> {
    let prepared = Prepared::new()?;
    let unet = prepared.unet()?;
    let residency = unet.residency();
    let (total, floor) = (residency.total_bytes(), residency.floor_bytes());
    let mut results = Vec::new();
    for (limit, prefetch) in [(0, false), (floor, true), (2 * floor, true), (total / 2, false), (total / 2, true)]
        .into_iter()
        .chain([(total - 1, true), (total, true), (u64::MAX, false)])
    {
        residency.set_limit(limit);
        residency.set_policy(policy(prefetch));
        residency.load(&mut proceed)?;
        let resident = unet.bytes();
        let mut seen = (0, 0);
        let mut observer = |event: &SegmentEvent<'_>| {
            if event.resident {
                seen.0 += 1
            } else {
                seen.1 += 1
            }
            let held = unet.bytes() + residency.passing_bytes();
            assert!(held <= limit.max(floor), "{held} bytes are bound under a limit of {limit}");
            ControlFlow::Continue(())
        };
        results.push(prepared.step(&unet, &mut observer)?);
        assert_eq!(seen.0 + seen.1, residency.segments().len());
        if limit <= floor {
            assert_eq!((resident, seen.0), (0, 0), "nothing is resident");
        } else if limit >= total {
            assert_eq!((resident, seen.1), (total, 0), "nothing is streamed");
        } else if limit >= total / 2 {
            assert!(seen.0 > 2 && seen.1 > 0 && resident >= limit - 3 * floor, "{seen:?}, {resident} of {limit}");
        }
        assert_eq!(unet.bytes(), resident, "a run leaves residency as it was");
        assert_eq!(residency.passing_bytes(), 0, "nothing is left of the ring");
    }
    for other in &results[1..] {
        assert_eq!(compare(other, &results[0])?, 0.0);
    }
    Ok(())
}

#[test]
fn what_is_brought_in_is_what_streams_times_the_passes() -> Result<()> {
    let prepared = Prepared::new()?;
    let unet = prepared.unet()?;
    let residency = unet.residency();
    let half = residency.total_bytes() / 2;
    for prefetch in [false, true] {
        residency.set_limit(half);
        residency.set_policy(policy(prefetch));
        residency.load(&mut proceed)?;
        residency.take_totals();
        let (passes, segments) = (3, residency.segments().len());
        residency.expect(passes);
        let mut ahead = 0;
        for pass in 0..passes {
            let mut observer = |event: &SegmentEvent<'_>| {
                // The start of a pass finds what the end of the one before has read ahead for it.
                if event.index == 0 && pass > 0 {
                    ahead = residency.passing_bytes();
                }
                ControlFlow::Continue(())
            };
            prepared.step(&unet, &mut observer)?;
        }
        let totals = residency.take_totals();
        let streamed = segments - totals.resident;
        assert!(streamed > 3 && totals.resident > 3, "{totals:?} of {segments}");
        assert_eq!(totals.streamed, streamed * passes);
        let each = residency.total_bytes() - residency.resident_bytes();
        assert_eq!(totals.streamed_bytes, each * passes as u64, "reading ahead: {prefetch}");
        assert_eq!(ahead > 0, prefetch);
        assert_eq!(residency.passing_bytes(), 0, "nothing is read for a pass that does not come");
    }
    Ok(())
}

#[test]
fn limits_that_fall_and_rise_at_any_segment_change_no_byte() -> Result<()> {
    let prepared = Prepared::new()?;
    let unet = prepared.unet()?;
    let residency = unet.residency();
    let (total, floor) = (residency.total_bytes(), residency.floor_bytes());
    residency.set_limit(u64::MAX);
    residency.load(&mut proceed)?;
    let undisturbed = prepared.step(&unet, &mut Uninterrupted)?;
    let limits = [total, 2 * floor, total / 2, floor, total / 3, total, 0, total / 4, total - 1];
    for (prefetch, every) in [(false, 1), (true, 1), (true, 3), (false, 5), (true, 7)] {
        residency.set_policy(policy(prefetch));
        residency.expect(2);
        let mut at = 0;
        for _ in 0..2 {
            let mut observer = |event: &SegmentEvent<'_>| {
                if event.index.is_multiple_of(every) {
                    let limit = limits[at % limits.len()];
                    at += 1;
                    residency.set_limit(limit);
                    residency.settle();
                    let held = unet.bytes() + residency.passing_bytes();
                    assert!(held <= limit, "{held} bytes are bound under a limit of {limit}");
                }
                ControlFlow::Continue(())
            };
            assert_eq!(compare(&prepared.step(&unet, &mut observer)?, &undisturbed)?, 0.0, "{prefetch}, {every}");
        }
        assert!(at >= 4);
    }
    Ok(())
}

#[test]
fn a_limit_that_rises_in_a_run_lets_segments_stay_as_they_come() -> Result<()> {
    let prepared = Prepared::new()?;
    let unet = prepared.unet()?;
    let residency = unet.residency();
    let total = residency.total_bytes();
    for prefetch in [false, true] {
        residency.set_policy(policy(prefetch));
        residency.set_limit(2 * residency.floor_bytes());
        residency.load(&mut proceed)?;
        let before = unet.bytes();
        let mut observer = |event: &SegmentEvent<'_>| {
            if event.index == 4 {
                residency.set_limit(total);
            }
            ControlFlow::Continue(())
        };
        prepared.step(&unet, &mut observer)?;
        assert!(unet.bytes() > before && unet.bytes() < total, "what had run before is not there");
        residency.take_totals();
        prepared.step(&unet, &mut Uninterrupted)?;
        assert_eq!(unet.bytes(), total);
        assert!(residency.take_totals().streamed < residency.segments().len());
        prepared.step(&unet, &mut Uninterrupted)?;
        assert_eq!(residency.take_totals().streamed, 0);
    }
    Ok(())
}

#[test]
fn a_run_that_is_stopped_while_reading_ahead_leaves_nothing_and_the_next_is_whole() -> Result<()> {
    let prepared = Prepared::new()?;
    let unet = prepared.unet()?;
    let residency = unet.residency();
    let undisturbed = prepared.step(&unet, &mut Uninterrupted)?;
    residency.set_policy(policy(true));
    residency.set_limit(residency.total_bytes() / 2);
    residency.load(&mut proceed)?;
    for stop in [0, 1, 7, residency.segments().len() - 1] {
        residency.expect(3);
        let mut observer = |event: &SegmentEvent<'_>| {
            if event.index == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        assert!(matches!(prepared.step(&unet, &mut observer), Err(ModelError::Cancelled { .. })));
        assert_eq!(residency.passing_bytes(), 0);
        assert_eq!(compare(&prepared.step(&unet, &mut Uninterrupted)?, &undisturbed)?, 0.0);
    }
    Ok(())
}

#[test]
fn a_bound_on_blocks_is_no_more_than_that() -> Result<()> {
    let prepared = Prepared::new()?;
    let unet = prepared.unet()?;
    let residency = unet.residency();
    residency.set_limit(u64::MAX);
    for (blocks, resident) in [(0, 2), (5, 7), (1000, residency.segments().len())] {
        residency.set_policy(Policy { blocks: Some(blocks), storage: Storage::Disk, ..policy(true) });
        residency.load(&mut proceed)?;
        residency.take_totals();
        prepared.step(&unet, &mut Uninterrupted)?;
        assert_eq!(residency.take_totals().resident, resident);
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
fn rows_in_chunks_give_the_same_bytes() -> Result<()> {
    let prepared = Prepared::new()?;
    let mut unet = prepared.unet()?;
    let mut text = ClipTextModel::open(&prepared.folder.path().join("text_encoder"))?;
    let ids = vec![vec![1; 77], vec![2; 77]];
    let whole = prepared.step(&unet, &mut Uninterrupted)?;
    let encoded = text.forward(&ids, 0, &mut Uninterrupted)?.conditioning;
    // Pieces of one row, of whole and broken kernel tiles, of more than one image, and of everything.
    for rows in [1, 7, 24, 97, 150, 100_000] {
        for chunks in
            [Chunks { tokens: rows, mlp: 0 }, Chunks { tokens: 0, mlp: rows }, Chunks { tokens: rows, mlp: rows }]
        {
            unet.set_chunks(chunks);
            text.set_chunks(chunks);
            assert_eq!(compare(&prepared.step(&unet, &mut Uninterrupted)?, &whole)?, 0.0, "{chunks:?}");
            let again = text.forward(&ids, 0, &mut Uninterrupted)?.conditioning;
            assert_eq!(compare(&again, &encoded)?, 0.0, "{chunks:?}");
        }
    }
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
