//! `--drafter`: whether what may follow a token is drafted, and verified by the model.

use std::path::Path;

use anyhow::{Result, bail};
use troika_engine::RunnerOptions;
use troika_model::DrafterStatus;

use crate::model_source::OpenModel;

/// Speculative decoding.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct DrafterArgs {
    /// `on`: the checkpoint's drafter proposes tokens, and the model verifies several of them in one step. The tokens are the same;
    /// whether they come sooner depends on the text and the machine, and where they do not, drafting pauses.
    #[arg(long, value_enum, default_value_t = Drafter::Off)]
    drafter: Drafter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Drafter {
    Off,
    On,
}

/// Why there is no drafter, if there is none: in the folder `dir`, or in the built-in model.
pub(crate) fn unavailable(status: &DrafterStatus, dir: Option<&Path>) -> Option<String> {
    let DrafterStatus::Unavailable { reason } = status else { return None };
    let place = dir.map_or_else(String::new, |dir| format!(" in {}", dir.display()));
    Some(format!("MTP unavailable: {reason}{place}"))
}

impl DrafterArgs {
    /// Asks for the drafter, if that is wanted.
    pub(crate) fn apply(self, model: &OpenModel, options: &mut RunnerOptions) -> Result<()> {
        if self.drafter == Drafter::On {
            if let Some(reason) = model.drafter_unavailable() {
                bail!("--drafter on: {reason}; --drafter off does without");
            }
            options.draft_context = true;
        }
        Ok(())
    }
}
