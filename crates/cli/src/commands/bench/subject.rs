//! A checkpoint as the benchmark needs it: flags for `serve`, digests, tokens for prompts.

use std::path::PathBuf;

use anyhow::{Context, Result};
use troika_base::NumericClass;
use troika_bench::corpus::{Corpus, Tokens};
use troika_bench::record::ModelFacts;

use crate::model_source::{ModelArgs, hex};

/// What is served, and what it is asked.
pub(in crate::commands) struct Opened {
    pub(in crate::commands) facts: ModelFacts,
    pub(in crate::commands) tokens: Tokens,
    pub(in crate::commands) max_context_tokens: usize,
    /// Why speculative decoding cannot be measured, if it cannot.
    pub(in crate::commands) drafter_unavailable: Option<String>,
}

/// Opens the checkpoint in `model`, nano without one, to be served in `class`.
pub(in crate::commands) fn open(model: Option<PathBuf>, class: NumericClass, corpus: Corpus) -> Result<Opened> {
    let mut args = vec!["--class".to_owned(), class.name().to_owned()];
    if let Some(dir) = &model {
        let dir = dir.to_str().with_context(|| format!("{} is not UTF-8", dir.display()))?;
        args.extend(["--model".to_owned(), dir.to_owned()]);
    }
    let open = ModelArgs::of(model, class).open()?;
    let [weights_sha256, tokenizer_sha256] = open.digests()?.map(|digest| hex(&digest));
    let class = class.name().to_owned();
    let facts = ModelFacts { name: open.name.clone(), args, weights_sha256, tokenizer_sha256, class };
    Ok(Opened {
        facts,
        tokens: Tokens::read(corpus, &*open.tokenizer()?)?,
        max_context_tokens: open.config.model.max_position_embeddings,
        drafter_unavailable: open.drafter_unavailable(),
    })
}
