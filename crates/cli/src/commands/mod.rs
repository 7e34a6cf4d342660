//! One file per command: its flags, and what it does with the libraries.

pub(crate) mod bench;
pub(crate) mod cache;
pub(crate) mod devices;
pub(crate) mod eval;
pub(crate) mod explain;
pub(crate) mod gate;
pub(crate) mod inspect;
pub(crate) mod launch;
pub(crate) mod logits;
pub(crate) mod plan;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod sim;
pub(crate) mod synth;
pub(crate) mod tune;
