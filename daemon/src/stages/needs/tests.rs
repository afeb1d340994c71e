//! Needs of stages: by size, by what is known, by mode and preset; tiles.

use std::path::Path;

use super::*;
use crate::config::memory::RawMemory;
use crate::jobs::admission::Fits;
use crate::jobs::fixtures;
use crate::jobs::request::{ImageFile, InitialImage};
use crate::residency::estimate::Source;
use crate::stages::dryrun::Found;
use crate::stages::memory::MemoryPlan;

const MIB: u64 = 1 << 20;

fn needs() -> DeviceNeeds {
    DeviceNeeds::new(DeviceId::cpu(), 1 << 30, Estimator::cpu())
}

/// A device of so many bytes, and a request under this table.
fn under(budget: u64, table: &str) -> (DeviceNeeds, Admitted) {
    let daemon: RawMemory = toml::from_str(table).unwrap();
    let needs = DeviceNeeds::new(DeviceId::cpu(), budget, Estimator::cpu())
        .configured(Memory { daemon, models: std::collections::BTreeMap::new() });
    let mut request = fixtures::admitted();
    (request.memory, request.plan) = needs.plans(&request.model, None);
    (needs, request)
}

fn weights(needs: &DeviceNeeds, request: &Admitted, stage: Stage) -> (u64, u64) {
    let parts = needs.parts(request, stage, None);
    let part = parts.iter().find(|part| part.purpose == Purpose::Weights).unwrap();
    (part.min, part.want)
}

#[test]
fn a_larger_picture_needs_more_where_pixels_matter() {
    let (needs, small) = (needs(), fixtures::admitted());
    let large = Admitted { width: 512, height: 512, ..small.clone() };
    let of = |request: &Admitted, stage| needs.estimate(request, stage, None).unwrap().working_set;
    assert_eq!(of(&small, Stage::Encode), of(&large, Stage::Encode));
    assert!(of(&small, Stage::Denoise) < of(&large, Stage::Denoise));
    assert!(of(&small, Stage::Decode) < of(&large, Stage::Decode));
    assert_eq!(Fits::needs(&needs, &small).len(), 3, "one entry a process");
}

#[test]
fn what_admission_counts_is_what_is_leased() {
    for (budget, table) in
        [(1 << 30, ""), (60 * MIB, ""), (1 << 30, "dit_gpu_blocks = 2"), (1 << 30, "offload_mode = \"none\"")]
    {
        let (needs, request) = under(budget, table);
        for need in Fits::needs(&needs, &request) {
            let parts = needs.parts(&request, need.stage, None);
            assert_eq!(parts.iter().map(|part| part.min).sum::<u64>(), need.least(), "{:?}", need.stage);
            assert!(parts.iter().map(|part| part.want).sum::<u64>() <= need.total());
        }
    }
}

#[test]
fn image_to_image_counts_both_halves_of_the_autoencoder() {
    let (needs, plain) = (needs(), fixtures::admitted());
    let initial = InitialImage { image: ImageFile::new(b"x"), mask: None, strength: 0.5 };
    let from_image = Admitted { initial: Some(initial), ..plain.clone() };
    let want = |request: &Admitted| weights(&needs, request, Stage::Decode).1;
    assert!(want(&plain) < want(&from_image));
    assert_eq!(Fits::needs(&needs, &from_image).len(), 3, "the autoencoder is one process");
}

#[test]
fn known_tokens_count_instead_of_the_bound() {
    let needs = needs();
    let request = Admitted { prompt: "word ".repeat(1000), ..fixtures::admitted() };
    let of = |tokens| needs.estimate(&request, Stage::Denoise, tokens).unwrap().working_set;
    assert!(of(Some(2 * 14 * 77)) < of(None));
}

#[test]
fn weights_are_streamed_only_where_mode_and_room_say_so() {
    let (roomy, request) = under(1 << 30, "");
    let (_, task) = request.model.report.task(Stage::Denoise).unwrap();
    let (all, ring) = (task.weights_bytes, task.largest_segment_bytes);
    assert_eq!(weights(&roomy, &request, Stage::Denoise), (ring, all), "auto may be revised down to the ring");
    for mode in ["none", "cond_only", "cond_diffusion", "aggressive"] {
        let (needs, request) = under(1 << 30, &format!("offload_mode = \"{mode}\""));
        assert_eq!(weights(&needs, &request, Stage::Denoise), (all, all), "{mode}");
    }
    let (ahead, request) = under(1 << 30, "streaming_prefetch = 1");
    assert_eq!(weights(&ahead, &request, Stage::Denoise).0, 2 * ring);
    let (tight, request) = under(60 * MIB, "");
    let (least, want) = weights(&tight, &request, Stage::Denoise);
    assert!(least == ring && ring < want && want < all, "{least} {want}");
}

#[test]
fn no_preset_streams_what_its_grant_holds_whole_and_counts_of_users_do() {
    for preset in ["auto", "24gb", "16gb", "12gb", "8gb", "minimal"] {
        let (needs, request) = under(1 << 30, &format!("preset = \"{preset}\""));
        for stage in [Stage::Encode, Stage::Denoise, Stage::Decode] {
            let all = request.model.report.task(stage).unwrap().1.weights_bytes;
            assert_eq!(weights(&needs, &request, stage).1, all, "{preset} {stage:?}");
        }
    }
    let (needs, request) = under(60 * MIB, "preset = \"minimal\"");
    let ring = request.model.report.task(Stage::Denoise).unwrap().1.largest_segment_bytes;
    assert_eq!(weights(&needs, &request, Stage::Denoise), (ring, ring), "0 blocks where it does not fit whole");
    let (needs, request) = under(1 << 30, "dit_gpu_blocks = 0\nvae_resident = false");
    assert!(weights(&needs, &request, Stage::Denoise).1 <= 3 * ring);
    let (needs, request) = under(1 << 30, "dit_gpu_blocks = 100000");
    let all = request.model.report.task(Stage::Denoise).unwrap().1.weights_bytes;
    assert_eq!(weights(&needs, &request, Stage::Denoise).1, all, "clamped");
}

#[test]
fn tiles_come_where_the_whole_does_not_fit_and_never_from_what_was_learned() {
    let large = |(needs, request): (DeviceNeeds, Admitted)| (needs, Admitted { width: 1024, height: 1024, ..request });
    let tile = |budget, table: &str| {
        let (needs, mut request) = large(under(budget, table));
        needs.choose_tiles(&mut request);
        assert_eq!(
            (request.plan.vae_tile, request.plan.vae_tile_overlap),
            (request.memory.vae.tile, request.memory.vae.overlap)
        );
        (request.plan.vae_tile, request.plan.vae_tile_overlap)
    };
    assert_eq!(tile(4 << 30, ""), (0, 0));
    let (edge, overlap) = tile(300 * MIB, "");
    assert!(edge > 0 && overlap == 0, "{edge} {overlap}");
    assert_eq!(tile(300 * MIB, "vae_tiling = false"), (0, 0));
    assert_eq!(tile(4 << 30, "vae_tiling = true").0, 512);
    assert_eq!(tile(4 << 30, "vae_tiling = true\nvae_tile_size = 320\nvae_tile_overlap = 40"), (320, 40));

    let (needs, mut request) = large(under(300 * MIB, ""));
    needs.choose_tiles(&mut request);
    let whole = Admitted { width: 1024, height: 1024, ..under(300 * MIB, "").1 };
    needs.measured(&whole, Stage::Decode, None, 1, 0);
    let before = request.plan.clone();
    needs.choose_tiles(&mut request);
    assert_eq!(request.plan, before);
}

/// Answers every stage with a number of its own, and counts how often it is asked.
struct Fixed(std::sync::atomic::AtomicUsize);

impl DryRunner for Fixed {
    fn dry_run<'a>(&'a self, _: &'a Path, question: &'a Question) -> Found<'a> {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let found = question.stages.iter().map(|stage| (stage_name(*stage).to_owned(), 3 * MIB)).collect();
        Box::pin(std::future::ready(Ok(found)))
    }
}

#[tokio::test]
async fn a_shape_is_run_dry_once_and_its_number_is_the_one_that_is_leased() {
    let runner = Arc::new(Fixed(std::sync::atomic::AtomicUsize::new(0)));
    let needs = needs().with_dry_runs(runner.clone());
    let request = fixtures::admitted();
    let by_formula = needs.estimate(&request, Stage::Decode, None).unwrap();
    for _ in 0..3 {
        needs.prepare(&request).await;
    }
    assert_eq!(runner.0.load(std::sync::atomic::Ordering::Relaxed), 1);
    let dry = needs.estimate(&request, Stage::Decode, None).unwrap();
    assert!(dry.source == Source::DryRun && dry.working_set < by_formula.working_set, "{dry:?} {by_formula:?}");
    // Fewer tokens than the bound by which it was admitted take less, by the same run.
    let fewer = needs.estimate(&request, Stage::Denoise, Some(154)).unwrap();
    assert_eq!(fewer.source, Source::DryRun);
    let formula = Admitted { memory: MemoryPlan { dry_run: false, ..request.memory.clone() }, ..request.clone() };
    assert_eq!(needs.estimate(&formula, Stage::Decode, None).unwrap().source, Source::Formula);
}
