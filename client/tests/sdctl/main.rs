//! `sdctl` as a program, against a daemon of pretence in the test's process.

mod commands;
mod generate;
mod memory;
mod support;
