//! A real worker under changing leases: what it holds is what the kernel counts, and pictures do not change.

use std::path::PathBuf;

use sd_engine::testkit::noise;
use sd_proto::exit::WorkerExit;
use sd_proto::worker::v1::task::Work;
use sd_proto::worker::v1::{
    DenoiseWork, LeasePurpose, LoadWork, Task, TaskDone, TaskError, TaskMemory, WeightStorage, from_worker,
};
use sd_tests::linked::{LinkedWorker, Shared};
use sd_tests::programs::repository;

const MIB: u64 = 1 << 20;
/// The weights lease of every test.
const WEIGHTS: u64 = 2;

fn model() -> PathBuf {
    repository().join("models/default")
}

/// A diffusion worker with leases for everything but weights.
fn worker() -> LinkedWorker {
    let worker = LinkedWorker::start("diffusion", &model());
    worker.grant(1, LeasePurpose::Context, 8 * MIB);
    worker.grant(3, LeasePurpose::WorkingSet, 256 * MIB);
    worker
}

/// A denoise task of a picture of `side` pixels.
struct Denoise {
    task: Task,
    latents: Shared,
    _conditioning: Shared,
}

impl Denoise {
    fn new(side: u64, steps: u32, memory: TaskMemory) -> Self {
        let shape = [2, 77, 192];
        let values = noise("conditioning", &shape).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let conditioning = Shared::input("conditioning", &shape.map(|dim| dim as u64), &values);
        let latents = Shared::output("latents", &[1, 4, side / 8, side / 8]);
        let work = DenoiseWork {
            width: side as u32,
            height: side as u32,
            seed: 7,
            steps,
            guidance_scale: 3.0,
            sampler: "ddim".into(),
            ..DenoiseWork::default()
        };
        let task = Task {
            task_id: 1,
            job_id: "job".into(),
            inputs: vec![conditioning.named.clone()],
            outputs: vec![latents.named.clone()],
            work: Some(Work::Denoise(work)),
            memory: Some(memory),
            ..Task::default()
        };
        Self { task, latents, _conditioning: conditioning }
    }

    fn run(&self, worker: &mut LinkedWorker) -> (TaskDone, Vec<u8>) {
        worker.task(&self.task);
        (worker.done(), self.latents.bytes())
    }
}

fn anonymous(worker: &LinkedWorker) -> u64 {
    worker.process().anonymous().unwrap()
}

#[test]
fn blocks_are_given_back_in_the_middle_of_sampling_and_taken_again_and_the_picture_is_the_same() {
    let mut worker = worker();
    worker.until(|message| matches!(message, from_worker::Message::Pulse(_)).then_some(()));
    let context = anonymous(&worker);
    worker.grant(WEIGHTS, LeasePurpose::Weights, 1 << 30);
    let sampling = Denoise::new(128, 30, TaskMemory { prefetch: true, ..TaskMemory::default() });
    let (undisturbed, picture) = sampling.run(&mut worker);
    let total = undisturbed.weights_bytes;
    assert_eq!((undisturbed.resident_segments, undisturbed.streamed_segments), (undisturbed.segments, 0));
    assert!(total > 32 * MIB && undisturbed.peak_bytes > total, "{undisturbed:?}");

    // Given back while it samples: memory is gone when the lease is, and the run goes on.
    sampling.latents.bytes().fill(0);
    worker.task(&sampling.task);
    worker.steps(2);
    let held = anonymous(&worker);
    let small = total / 3;
    worker.revise(WEIGHTS, small);
    let returned = worker.returned_while_running();
    assert_eq!((returned.lease_id, returned.bytes), (WEIGHTS, small));
    let left = anonymous(&worker);
    assert!(left + (total - small) / 2 < held, "{left} of {held} bytes are left, {total} are to become {small}");
    // And more is taken as soon as there is more.
    worker.grant(WEIGHTS, LeasePurpose::Weights, 1 << 30);
    let disturbed = worker.done();
    assert_eq!(sampling.latents.bytes(), picture, "the same picture");
    assert!(disturbed.streamed_segments > 0 && disturbed.weights_bytes > small, "{disturbed:?}");
    assert!(disturbed.streamed_bytes > 0);

    // Parked: the process stays and holds next to nothing.
    worker.revise(WEIGHTS, 0);
    assert_eq!(worker.returned().bytes, 0);
    let parked = anonymous(&worker);
    assert!(parked < context + 32 * MIB, "{parked} bytes are held parked, {context} before anything was loaded");

    // And streams with what a third holds, as it would have from the start.
    worker.grant(WEIGHTS, LeasePurpose::Weights, small);
    let (streamed, again) = sampling.run(&mut worker);
    assert_eq!(again, picture, "the same picture, streamed");
    assert!(streamed.weights_bytes <= small && streamed.resident_segments > 0, "{streamed:?}");
    let passing = u64::from(streamed.segments - streamed.resident_segments);
    assert_eq!(streamed.streamed_segments, passing * 30);
    assert_eq!(streamed.streamed_bytes, (total - streamed.weights_bytes) * 30);
    assert!(streamed.peak_bytes + (total - small) / 2 < undisturbed.peak_bytes, "{streamed:?} after {undisturbed:?}");
}

#[test]
fn a_task_that_its_lease_does_not_hold_fails_as_out_of_memory_and_the_worker_lives() {
    let mut worker = worker();
    worker.grant(WEIGHTS, LeasePurpose::Weights, MIB / 8);
    let load = Task { task_id: 1, work: Some(Work::Load(LoadWork {})), ..Task::default() };
    worker.task(&load);
    let failed = worker.until(|message| match message {
        from_worker::Message::Failed(failed) => Some(failed),
        _ => None,
    });
    assert_eq!(failed.error(), TaskError::OutOfMemory);
    assert!(failed.message.contains("131072 bytes"), "{}", failed.message);
    worker.grant(WEIGHTS, LeasePurpose::Weights, 1 << 30);
    worker.task(&load);
    let done = worker.done();
    assert!(done.weights_bytes > 0 && done.streamed_segments == 0, "{done:?}");
}

#[test]
fn memory_that_the_system_refuses_ends_the_worker_as_out_of_memory() {
    let mut worker = worker();
    worker.grant(WEIGHTS, LeasePurpose::Weights, 1 << 30);
    worker.task(&Task { task_id: 1, work: Some(Work::Load(LoadWork {})), ..Task::default() });
    worker.done();
    // What it has mapped, and a little: far from what a large picture takes.
    let pid = worker.process().pid;
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    let mapped = statm.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096;
    let limit = libc::rlimit { rlim_cur: mapped + 16 * MIB, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the limit is read, nothing is written.
    assert_eq!(unsafe { libc::prlimit(pid, libc::RLIMIT_AS, &limit, std::ptr::null_mut()) }, 0);
    // Kept until the worker has ended: its segments go with it.
    let large = Denoise::new(8192, 2, TaskMemory::default());
    worker.task(&large.task);
    let (code, said) = worker.end();
    assert_eq!(code, Some(WorkerExit::OutOfMemory.code()), "{said}");
    assert!(said.contains("out of memory"), "{said}");
}

#[test]
fn weights_that_are_kept_on_disk_leave_no_page_of_their_file_in_the_process() {
    let mapped = |storage: WeightStorage| {
        let mut worker = worker();
        worker.grant(WEIGHTS, LeasePurpose::Weights, 1 << 30);
        let memory = TaskMemory { storage: storage as i32, ..TaskMemory::default() };
        let load = Task { task_id: 1, work: Some(Work::Load(LoadWork {})), memory: Some(memory), ..Task::default() };
        worker.task(&load);
        worker.done();
        worker.process().mapped_of("unet/diffusion_pytorch_model.safetensors").unwrap()
    };
    let size = std::fs::metadata(model().join("unet/diffusion_pytorch_model.safetensors")).unwrap().len();
    let (kept, gone) = (mapped(WeightStorage::Ram), mapped(WeightStorage::Disk));
    assert!(kept > size / 4 * 3, "{kept} of {size} bytes are mapped and touched");
    assert!(gone < size / 4, "{gone} of {size} bytes are left");
}
