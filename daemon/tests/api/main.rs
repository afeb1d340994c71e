//! The public services over a real Unix socket, with a fake runner of stages and a fake inspector of models.

mod control;
mod decisions;
mod generation;
mod support;
