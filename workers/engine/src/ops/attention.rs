//! Scaled dot-product attention in blocks, with a running softmax: no matrix of all queries by all keys.

use std::cell::RefCell;

use candle_core::{Result, Tensor, bail};

use super::kernel::{Line, MR, NR, Start, Tile, kernel};
use super::packed::SharedLines;
use super::simd::{LANES, exp, fma, fold, simd};
use super::tensor::{Output, with_storage};
use super::threads::parallel;

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AttentionMask {
    /// All.
    #[default]
    None,
    /// Those not after it: query `i` sees keys `0..=i + (Skv − Sq)`.
    Causal,
}

/// Queries that go through the keys together.
const Q_BLOCK: usize = 96;

/// Keys taken at a time: their part of K and V stays in the second cache, and depends on the shape alone.
fn kv_block(width: usize) -> usize {
    (24_576 / width).clamp(64, 512) / NR * NR
}

/// `softmax(scale · Q Kᵀ + mask) V` per head: `q` `[B, Sq, H, D]`, `k` and `v` `[B, Skv, H, D]`, strided views allowed;
/// gives `[B, Sq, H·D]`.
///
/// Working set: K and V once more, `B · H · (⌈Skv⌉₁₆ · D + Skv · ⌈D⌉₁₆)` floats, and per thread
/// `96 · (kv_block + ⌈D⌉₁₆)` floats, where `kv_block` is at most 512. Copies of inputs whose last axis is strided.
///
/// # Errors
/// If shapes do not fit, there is no key, or a causal mask has more queries than keys.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, mask: AttentionMask) -> Result<Tensor> {
    let (b, sq, h, d) = q.dims4()?;
    let skv = k.dim(1)?;
    if k.dims() != [b, skv, h, d] || v.dims() != k.dims() || skv == 0 || d == 0 {
        bail!("attention: q {:?}, k {:?} and v {:?} do not fit", q.shape(), k.shape(), v.shape());
    }
    if mask == AttentionMask::Causal && skv < sq {
        bail!("attention: a causal mask needs at least as many keys as queries, got {skv} and {sq}");
    }
    let dense = |x: &Tensor| if x.stride()[3] == 1 || d == 1 { Ok(x.clone()) } else { x.contiguous() };
    let (q, k, v) = (dense(q)?, dense(k)?, dense(v)?);
    with_storage(&q, |qs| {
        with_storage(&k, |ks| {
            with_storage(&v, |vs| {
                let heads = Heads {
                    q: View::new(qs, &q),
                    k: View::new(ks, &k),
                    v: View::new(vs, &v),
                    h,
                    sq,
                    skv,
                    d,
                    scale,
                    mask,
                };
                heads.run(b)
            })
        })
    })
}

/// `[B, S, H, D]` somewhere in memory; the last axis is dense.
struct View<'a> {
    data: &'a [f32],
    strides: [usize; 3],
    d: usize,
}

impl<'a> View<'a> {
    fn new(data: &'a [f32], x: &Tensor) -> Self {
        let s = x.stride();
        Self { data, strides: [s[0], s[1], s[2]], d: x.dims()[3] }
    }

    fn row(&self, b: usize, s: usize, h: usize) -> &'a [f32] {
        let at = b * self.strides[0] + s * self.strides[1] + h * self.strides[2];
        &self.data[at..at + self.d]
    }
}

struct Heads<'a> {
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    h: usize,
    sq: usize,
    skv: usize,
    d: usize,
    scale: f32,
    mask: AttentionMask,
}

#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    sums: Vec<f32>,
    q_rows: Vec<*const f32>,
    score_rows: Vec<*const f32>,
    score_targets: Vec<*mut f32>,
    sum_targets: Vec<*mut f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// Keys and values of all heads, packed for the kernel.
struct PackedHeads {
    lines: Vec<Line>,
    /// Lines of one head's keys, and of keys and values.
    keys: usize,
    head: usize,
}

impl Heads<'_> {
    fn run(&self, b: usize) -> Result<Tensor> {
        let width = self.h * self.d;
        let packed = self.pack(b)?;
        let mut out = Output::new(b * self.sq * width);
        let shared = out.shared();
        let blocks = self.sq.div_ceil(Q_BLOCK);
        let cost = b * self.h * self.sq * self.skv * (self.d / 20 + 2);
        parallel(b * self.h * blocks, cost, |task| {
            // The last blocks of a causal mask are the longest, so they go first.
            let (head, block) = (task / blocks, blocks - 1 - task % blocks);
            let first = block * Q_BLOCK;
            let count = Q_BLOCK.min(self.sq - first);
            SCRATCH.with_borrow_mut(|scratch| {
                let l = self.attend(head, first, count, &packed, scratch);
                let d16 = self.d.next_multiple_of(NR);
                for (i, sums) in scratch.sums.chunks_exact(d16).take(count).enumerate() {
                    let at = ((head / self.h) * self.sq + first + i) * width + head % self.h * self.d;
                    // SAFETY: each query of each head has its own range.
                    let to = unsafe { shared.slice(at, self.d) };
                    let inverse = 1.0 / l[i];
                    for (to, &v) in to.iter_mut().zip(sums) {
                        to.write(v * inverse);
                    }
                }
            });
        })?;
        // SAFETY: tasks are all blocks of all heads.
        unsafe { out.finish((b, self.sq, width)) }
    }

    fn pack(&self, b: usize) -> Result<PackedHeads> {
        let (d, skv, h) = (self.d, self.skv, self.h);
        let keys = skv.div_ceil(NR) * d;
        let head = keys + d.div_ceil(NR) * skv;
        let mut lines = Vec::<Line>::with_capacity(b * h * head);
        let floats = SharedLines(lines.as_mut_ptr());
        let panels = skv.div_ceil(NR);
        parallel(b * h * panels, b * h * skv * d * 2, |task| {
            let (at, panel) = (task / panels, task % panels);
            let first = panel * NR;
            let count = NR.min(skv - first);
            // SAFETY: each panel of keys has its own lines.
            let lines = unsafe { floats.slice(at * head + panel * d, d) };
            for j in 0..NR {
                // Beyond the last key the columns only have to be something.
                let row = self.k.row(at / h, first + j.min(count - 1), at % h);
                for (line, &v) in lines.iter_mut().zip(row) {
                    line[j].write(v);
                }
            }
            for j in first..first + count {
                let row = self.v.row(at / h, j, at % h);
                for (p, part) in row.chunks(NR).enumerate() {
                    // SAFETY: each value has its own line in each panel.
                    let lines = unsafe { floats.slice(at * head + keys + p * skv + j, 1) };
                    let (dense, rest) = lines[0].split_at_mut(part.len());
                    for (to, &v) in dense.iter_mut().zip(part) {
                        to.write(v);
                    }
                    for to in rest {
                        to.write(0.0);
                    }
                }
            }
        })?;
        // SAFETY: all panels of keys and all values were written.
        unsafe { lines.set_len(b * h * head) };
        Ok(PackedHeads { lines, keys, head })
    }

    /// Leaves the sums of `count` queries from `first` on in `scratch.sums`, and gives what to divide them by.
    fn attend(
        &self,
        head: usize,
        first: usize,
        count: usize,
        packed: &PackedHeads,
        scratch: &mut Scratch,
    ) -> [f32; Q_BLOCK] {
        let (d, skv) = (self.d, self.skv);
        let d16 = d.next_multiple_of(NR);
        let block = kv_block(d);
        let lines = &packed.lines[head * packed.head..(head + 1) * packed.head];
        let (keys, values) = lines.split_at(packed.keys);
        let Scratch { scores, sums, q_rows, score_rows, score_targets, sum_targets } = scratch;
        scores.resize(Q_BLOCK * block.max(scores.len() / Q_BLOCK), 0.0);
        sums.clear();
        sums.resize(Q_BLOCK * d16, 0.0);
        q_rows.clear();
        q_rows.extend((0..count).map(|i| self.q.row(head / self.h, first + i, head % self.h).as_ptr()));
        score_rows.clear();
        score_targets.clear();
        score_targets.extend(scores.chunks_exact_mut(block).take(count).map(|row| row.as_mut_ptr()));
        score_rows.extend(score_targets.iter().map(|row| row.cast_const()));
        sum_targets.clear();
        sum_targets.extend(sums.chunks_exact_mut(d16).take(count).map(|row| row.as_mut_ptr()));
        let multiply = |start: Start, rows: &[*const f32], targets: &[*mut f32], at: usize, b: &[Line]| {
            let whole = kernel(MR, start);
            let mut tile = Tile {
                rows: std::ptr::null(),
                taps: 1,
                from: 0,
                len: b.len(),
                b: b.as_ptr(),
                c: std::ptr::null(),
                at,
                bias: std::ptr::null(),
            };
            for (rows, targets) in rows.chunks(MR).zip(targets.chunks(MR)) {
                (tile.rows, tile.c) = (rows.as_ptr(), targets.as_ptr());
                // SAFETY: rows of Q have `d` elements, of scores `block`, of sums `d16`; `at` leaves a panel of them.
                unsafe {
                    match rows.len() {
                        MR => whole(&tile),
                        m => kernel(m, start)(&tile),
                    }
                }
            }
        };
        let (mut max, mut total) = ([f32::NEG_INFINITY; Q_BLOCK], [0f32; Q_BLOCK]);
        let visible = |i: usize| match self.mask {
            AttentionMask::None => skv,
            AttentionMask::Causal => first + i + 1 + skv - self.sq,
        };
        let end = visible(count - 1);
        for start in (0..end).step_by(block) {
            let len = block.min(end - start);
            for panel in 0..len.div_ceil(NR) {
                multiply(Start::Zero, q_rows, score_targets, panel * NR, &keys[(start / NR + panel) * d..][..d]);
            }
            for i in 0..count {
                // SAFETY: rows of scores and sums are `block` and `d16` long and disjoint; addresses of all rows were taken
                // from the vectors above, which are not used themselves until the end.
                let (row, sums) = unsafe {
                    let row = std::slice::from_raw_parts_mut(score_targets[i], len);
                    (row, std::slice::from_raw_parts_mut(sum_targets[i], d16))
                };
                let seen = visible(i).saturating_sub(start).min(len);
                row[seen..].fill(0.0);
                if seen > 0 {
                    soften(&mut row[..seen], sums, self.scale, &mut max[i], &mut total[i]);
                }
            }
            for (p, values) in values.chunks_exact(skv).enumerate() {
                multiply(Start::Load, score_rows, sum_targets, p * NR, &values[start..start + len]);
            }
        }
        total
    }
}

#[inline(always)]
fn soften_body<const FMA: bool>(row: &mut [f32], sums: &mut [f32], scale: f32, max: &mut f32, total: &mut f32) {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let chunks = row.chunks_exact(LANES);
    for (lane, &v) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = larger(*lane, v * scale);
    }
    for c in chunks {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], c[l] * scale);
        }
    }
    let new = larger(*max, fold(lanes, larger));
    let mut lanes = [0f32; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for c in &mut chunks {
        for l in 0..LANES {
            c[l] = exp::<FMA>(fma::<FMA>(c[l], scale, -new));
            lanes[l] += c[l];
        }
    }
    for (lane, v) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *v = exp::<FMA>(fma::<FMA>(*v, scale, -new));
        *lane += *v;
    }
    let sum = fold(lanes, |a, b| a + b);
    if new == *max {
        *total += sum;
        return;
    }
    // Before the first block the maximum is −∞ and everything is zero still.
    let shrink = if *max == f32::NEG_INFINITY { 0.0 } else { exp::<FMA>(*max - new) };
    *total = fma::<FMA>(*total, shrink, sum);
    for v in sums {
        *v *= shrink;
    }
    *max = new;
}

simd! {
    /// Turns scores into weights about the running maximum, and rescales what was summed about an earlier one.
    fn soften(row: &mut [f32], sums: &mut [f32], scale: f32, max: &mut f32, total: &mut f32) = soften_body
}
