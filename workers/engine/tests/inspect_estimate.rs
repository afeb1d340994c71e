//! Dry runs: what a task takes at one shape is no more than the bound that a description gives, and not far below it.

use sd_engine::inspect::{Shape, Task, estimate, inspect};
use sd_engine::testkit::DefaultModel;

fn shape(width: u64, height: u64) -> Shape {
    Shape { width, height, rows: 2, tokens: 77, tile: 0, overlap: 0, tile_batch: 1 }
}

#[test]
fn a_dry_run_stays_within_the_bound_and_near_it() {
    let folder = DefaultModel::folder();
    let report = inspect(&folder).unwrap();
    let tasks: Vec<_> = report.components.iter().flat_map(|component| &component.tasks).collect();
    assert_eq!(tasks.len(), 4);
    for task in tasks {
        for (width, height) in [(128, 128), (256, 192), (512, 512), (520, 264)] {
            let dry = estimate(&folder, task.task, &shape(width, height)).unwrap().working_set_bytes;
            let bound = task.working_set.bytes(width, height, 2 * 77);
            assert!(dry <= bound, "{:?} at {width} × {height}: {dry} beyond {bound}", task.task);
            // The bound covers eight windows of prompt whatever is asked.
            assert!(dry > bound / 3, "{:?} at {width} × {height}: {dry} of {bound}", task.task);
        }
    }
}

#[test]
fn tiles_take_less_and_a_larger_picture_more() {
    let folder = DefaultModel::folder();
    let of = |task, shape: &Shape| estimate(&folder, task, shape).unwrap().working_set_bytes;
    for task in [Task::Decode, Task::VaeEncode] {
        let whole = shape(1024, 1024);
        let tiled = Shape { tile: 256, overlap: 64, ..whole };
        assert!(of(task, &tiled) < of(task, &whole), "{task:?}");
        assert_eq!(of(task, &Shape { tile: 1024, ..whole }), of(task, &whole), "no larger than a tile is whole");
        assert!(of(task, &whole) > of(task, &shape(512, 512)));
    }
    assert!(of(Task::Denoise, &Shape { rows: 1, ..shape(512, 512) }) < of(Task::Denoise, &shape(512, 512)));
    assert!(of(Task::Encode, &Shape { tokens: 770, ..shape(64, 64) }) > of(Task::Encode, &shape(64, 64)));
}
