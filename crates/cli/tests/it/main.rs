//! The `troika` command as a user meets it: real processes, real files, exit codes and messages.

mod benchmark;
mod clients;
mod commands;
mod diagnosis;
mod hybrid;
mod serving;
mod support;
