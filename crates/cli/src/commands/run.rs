//! `troika run`: one generation, streamed to standard output.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use troika_base::NumericClass;
use troika_base::units::human_bytes;
use troika_engine::api::{
    Delivery, DraftCounts, Event, EventSink, FinishReason, GenerateRequest, Generator, Sampling, SubmitError,
};
use troika_engine::{Engine, EngineOptions};
use troika_prompt::{
    ChatOptions, Conversation, Detokenizer, FixedTexts, MarkerText, Message, StopMatcher, ThinkingMode, Tokenizer,
    encode_chat, encode_completion,
};

use super::serve::{Signal, terminated};
use crate::drafter::DrafterArgs;
use crate::hybrid::{HybridArgs, WavefrontArgs};
use crate::memory::{self, MemoryArgs};
use crate::model_source::ModelArgs;
use crate::tuning::TuningArgs;
use crate::{progress, report};

/// Generate text from a prompt.
///
/// The text streams to standard output; a summary of speed and memory goes to standard error. The same prompt, settings and
/// seed give the same text.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The prompt; `-` or nothing reads standard input.
    prompt: Option<String>,
    /// Read the prompt from FILE.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    hybrid: HybridArgs,
    #[command(flatten)]
    wavefront: WavefrontArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    #[command(flatten)]
    drafter: DrafterArgs,
    /// Take the prompt as a user's message to answer, not as a text to continue.
    #[arg(long)]
    chat: bool,
    /// Most tokens to generate.
    #[arg(short = 'n', long = "max-tokens", default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Seed of the random choices.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Randomness: 0 = always the most likely token. Default: what the checkpoint advises.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep the smallest set of tokens that are this likely together. Default: what the checkpoint advises.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Keep this many of the most likely tokens; 0 = all.
    #[arg(long, default_value_t = 0, value_name = "K")]
    top_k: usize,
    /// Keep tokens at least this fraction as likely as the best.
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    min_p: f32,
    /// End the text before this string; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    #[command(flatten)]
    memory: MemoryArgs,
}

/// Hands the engine's events to the task that prints. Holds at most one event per token.
struct Printer(UnboundedSender<Event>);

impl EventSink for Printer {
    fn offer(&mut self, event: &Event) -> Delivery {
        if self.0.send(event.clone()).is_ok() { Delivery::Taken } else { Delivery::Gone }
    }
}

/// How a generation ended.
enum End {
    Done(FinishReason),
    /// A stop string was found.
    Stopped,
    Interrupted(Signal),
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn run(args: &Args) -> Result<ExitCode> {
    ensure!(!args.stop.iter().any(String::is_empty), "--stop: an empty string would end the text at once");
    let prompt = read_prompt(args)?;
    let start = Instant::now();
    let class = args.model.class_or(NumericClass::Fast);
    let model = args.model.open()?;
    let tokenizer = model.tokenizer()?;
    let ids = encode(&tokenizer, &model.texts(), prompt, args.chat)?;
    let sampling = sampling(args, model.sampling_advice()?);
    let request = GenerateRequest {
        stop_tokens: model.config.eos_token_ids.clone(),
        ..GenerateRequest::new(ids, args.max_tokens as usize, sampling)
    };
    let mut options = args.model.runner_options(class);
    args.drafter.apply(&model, &mut options)?;
    let (hybrid, wavefront) = args.tuning.apply(&model, &options, &args.hybrid, args.wavefront.steps())?;
    let (runner, wavefront) = model.hybrid_runner(options, &hybrid, wavefront, args.memory.of_engines())?;
    let options = EngineOptions {
        chunk_tokens: 512,
        honour_chunk: false,
        wavefront,
        max_running: 1,
        max_queued: 1,
        max_context_tokens: model.config.model.max_position_embeddings,
        max_itl: EngineOptions::DEFAULT_MAX_ITL,
        memory_bytes: args.memory.resolve(model.weights_bytes(), 0),
        cache_bytes: 0,
        snapshot_spacing: EngineOptions::DEFAULT_SNAPSHOT_SPACING,
    };
    let engine = Engine::start(runner, options)?;
    memory::report(&engine)?;
    let loaded = start.elapsed();
    let prompt_tokens = request.prompt.len();
    let (events, received) = unbounded_channel();
    let submitted = Instant::now();
    let id = engine.submit(request, Box::new(Printer(events))).map_err(|error| match error {
        SubmitError::NeverFits { .. } => anyhow!("{error}; give a larger --memory-limit or a shorter prompt"),
        other => other.into(),
    })?;
    let mut printed = Printed::new(tokenizer, &args.stop, prompt_tokens);
    let end = printed.print(received).await?;
    engine.cancel(id);
    engine.shutdown();
    let drafts = engine.status().drafts;
    if printed.text_bytes > 0 && !printed.ends_with_newline {
        println!();
    }
    summarize(&printed, &end, drafts.as_ref(), submitted, loaded.as_secs_f64());
    Ok(match end {
        End::Interrupted(signal) => signal.exit_code(),
        _ => ExitCode::SUCCESS,
    })
}

fn read_prompt(args: &Args) -> Result<String> {
    let stdin = || std::io::read_to_string(std::io::stdin()).context("standard input is not UTF-8 text");
    match (&args.prompt, &args.file) {
        (Some(prompt), _) if prompt != "-" => Ok(prompt.clone()),
        (None, Some(file)) if file != Path::new("-") => {
            std::fs::read_to_string(file).with_context(|| format!("cannot read the prompt from {}", file.display()))
        }
        (None, None) if std::io::stdin().is_terminal() => {
            bail!("no prompt: give it as an argument, with --file FILE, or on standard input")
        }
        _ => stdin(),
    }
}

fn encode(tokenizer: &Tokenizer, texts: &FixedTexts, prompt: String, chat: bool) -> Result<Vec<u32>> {
    Ok(if chat {
        let conversation = Conversation { messages: vec![Message::user(prompt)], ..Conversation::default() };
        encode_chat(tokenizer, texts, &conversation, ChatOptions::new(ThinkingMode::Chat))?.ids
    } else {
        encode_completion(tokenizer, &prompt)?
    })
}

fn sampling(args: &Args, (temperature, top_p): (f32, f32)) -> Sampling {
    Sampling {
        temperature: args.temperature.unwrap_or(temperature),
        top_p: args.top_p.unwrap_or(top_p),
        top_k: args.top_k,
        min_p: args.min_p,
        seed: args.seed,
        ..Sampling::GREEDY
    }
}

/// Turns tokens into text on standard output.
struct Printed {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    prefill: indicatif::ProgressBar,
    num_tokens: usize,
    prompt_tokens: usize,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    text_bytes: usize,
    ends_with_newline: bool,
}

impl Printed {
    fn new(tokenizer: Arc<Tokenizer>, stops: &[String], prompt_tokens: usize) -> Self {
        Self {
            detokenizer: Detokenizer::new(tokenizer, MarkerText::Hidden),
            stops: StopMatcher::new(stops),
            prefill: progress::tokens("prompt", prompt_tokens as u64),
            num_tokens: 0,
            prompt_tokens,
            first_token: None,
            last_token: None,
            text_bytes: 0,
            ends_with_newline: false,
        }
    }

    async fn print(&mut self, mut events: UnboundedReceiver<Event>) -> Result<End> {
        let mut signal = std::pin::pin!(terminated());
        loop {
            let event = tokio::select! {
                event = events.recv() => event.context("the engine stopped without a word")?,
                signal = &mut signal => return Ok(End::Interrupted(signal?)),
            };
            match event {
                Event::Prefilled { num_computed_tokens, .. } => self.prefill.set_position(num_computed_tokens as u64),
                Event::Token { token, .. } => {
                    self.prefill.finish_and_clear();
                    self.first_token.get_or_insert_with(Instant::now);
                    self.last_token = Some(Instant::now());
                    self.num_tokens += 1;
                    let piece = self.detokenizer.push(token);
                    if self.write(&piece)? {
                        return Ok(End::Stopped);
                    }
                }
                Event::Finished { reason, .. } => {
                    self.prefill.finish_and_clear();
                    let rest = self.detokenizer.finish();
                    if self.write(&rest)? {
                        return Ok(End::Stopped);
                    }
                    let held_back = self.stops.finish();
                    self.emit(&held_back)?;
                    return Ok(End::Done(reason));
                }
                Event::Failed { message } => bail!(message),
            }
        }
    }

    /// True if a stop string was found.
    fn write(&mut self, piece: &str) -> Result<bool> {
        let checked = self.stops.push(piece);
        self.emit(&checked.text)?;
        Ok(checked.stop.is_some())
    }

    fn emit(&mut self, text: &str) -> Result<()> {
        if !text.is_empty() {
            self.text_bytes += text.len();
            self.ends_with_newline = text.ends_with('\n');
            let mut out = std::io::stdout().lock();
            out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to standard output")?;
        }
        Ok(())
    }
}

fn summarize(printed: &Printed, end: &End, drafts: Option<&DraftCounts>, submitted: Instant, load_s: f64) {
    let rate = |tokens: usize, seconds: f64| {
        if seconds > 0.0 { format!("{:.1} tok/s", tokens as f64 / seconds) } else { "-".to_owned() }
    };
    let ttft = printed.first_token.map(|first| first.duration_since(submitted).as_secs_f64());
    let prompt = ttft.map_or("-".to_owned(), |s| rate(printed.prompt_tokens, s));
    let decode = match (printed.first_token, printed.last_token) {
        // The first token belongs to the prompt's time.
        (Some(first), Some(last)) if printed.num_tokens > 1 => {
            rate(printed.num_tokens - 1, last.duration_since(first).as_secs_f64())
        }
        _ => "-".to_owned(),
    };
    let why = match end {
        End::Done(FinishReason::StopToken(_) | FinishReason::ConstraintComplete) => "end of text",
        End::Done(FinishReason::Length) => "token limit (-n)",
        End::Done(FinishReason::ContextFull) => "context full",
        End::Done(FinishReason::MemoryFull) => "memory full (--memory-limit)",
        End::Done(_) => "cancelled",
        End::Stopped => "stop string",
        End::Interrupted(_) => "interrupted",
    };
    let memory = report::peak_memory_bytes().map_or("unknown".to_owned(), human_bytes);
    let ttft = ttft.map_or("-".to_owned(), |s| format!("{:.0} ms", s * 1e3));
    let drafts =
        drafts.map_or(String::new(), |counts| format!(", {} of {} drafts accepted", counts.accepted, counts.drafted));
    eprintln!(
        "prompt {} tokens, {prompt} | generated {} tokens, {decode}{drafts} | first token after {ttft} | loaded in {load_s:.2} s | \
         peak memory {memory} | ended by {why}",
        printed.prompt_tokens, printed.num_tokens,
    );
}
