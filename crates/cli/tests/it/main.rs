//! The `troika` command as a user meets it: real processes, real files, exit codes and messages.

mod benchmark;
mod clients;
mod commands;
mod diagnosis;
mod drafter;
mod hybrid;
#[cfg(target_os = "linux")]
mod memory;
mod ort;
mod serving;
mod simulation;
mod support;
mod tune;
