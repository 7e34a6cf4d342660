//! The fixed texts of a checkpoint's prompts: how tools are offered, what effort is asked for, how a reply is formatted.
//!
//! They belong to the checkpoint, so they are read from its `encoding/encoding_dsv4.py` and never embedded. A checkpoint
//! without them chats; only what needs one of them is refused.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::{
    PromptError,
    python::{Constant, MAX_FILE_BYTES, read_constants},
};

/// Longest text that is taken for one; published ones have about 1 KiB.
const MAX_TEXT_BYTES: usize = 64 << 10;
/// Where a checkpoint keeps the texts.
const FILE: &str = "encoding/encoding_dsv4.py";

/// How hard the model is asked to think, in thinking mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    /// Nothing is said about it.
    #[default]
    Low,
    High,
    Max,
}

impl Effort {
    /// What clients call it: the family's own names, and those of other interfaces.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "none" | "minimal" | "low" => Some(Self::Low),
            "medium" | "high" => Some(Self::High),
            "xhigh" | "max" => Some(Self::Max),
            _ => None,
        }
    }
}

/// Texts with places to fill in, and the effort prefixes.
#[derive(Clone, Debug)]
pub struct FixedTexts {
    file: PathBuf,
    /// Why nothing could be read.
    problem: Option<String>,
    tools: Option<String>,
    response_format: Option<String>,
    high: Option<String>,
    max: Option<String>,
}

impl FixedTexts {
    /// Reads the texts of the checkpoint in this folder. What is missing is said when it is needed.
    #[must_use]
    pub fn from_checkpoint(folder: &Path) -> Self {
        let file = folder.join(FILE);
        match read(&file) {
            Ok(source) => Self::from_source(file, &source),
            Err(problem) => Self::new(file, Some(problem)),
        }
    }

    /// Finds the texts in the source of a Python file; `file` is its name in errors.
    #[must_use]
    pub fn from_source(file: PathBuf, source: &str) -> Self {
        let constants = read_constants(source);
        let texts = || constants.iter().filter_map(|(name, value)| as_text(value).map(|text| (name, text)));
        // By the published name; failing that, the only text with the place that it must have.
        let find = |name: &str, place: &str, not: &str| {
            let fits = |text: &&str| {
                text.len() <= MAX_TEXT_BYTES && text.contains(place) && (not.is_empty() || !text.contains(not))
            };
            let named = constants.get(name).and_then(as_text).filter(fits);
            let mut others = texts().map(|(_, text)| text).filter(fits);
            named.or_else(|| others.next().filter(|_| others.next().is_none())).map(str::to_owned)
        };
        let efforts = efforts(&constants);
        let effort =
            |name: &str| efforts.get(name).filter(|text| text.len() <= MAX_TEXT_BYTES).map(|text| (*text).to_owned());
        // The family's first file has one prefix, `max`, and says nothing at `high`.
        let high = effort("high").or_else(|| efforts.contains_key("max").then(String::new));
        Self {
            tools: find("TOOLS_TEMPLATE", "{tool_schemas}", ""),
            response_format: find("response_format_template", "{schema}", "{tool_schemas}"),
            high,
            max: effort("max"),
            ..Self::new(file, None)
        }
    }

    fn new(file: PathBuf, problem: Option<String>) -> Self {
        Self { file, problem, tools: None, response_format: None, high: None, max: None }
    }

    /// The texts that this checkpoint lacks, each with the reason.
    #[must_use]
    pub fn missing(&self) -> Vec<PromptError> {
        let all = [
            self.tools().err(),
            self.response_format().err(),
            self.effort(Effort::High).err(),
            self.effort(Effort::Max).err(),
        ];
        all.into_iter().flatten().collect()
    }

    /// Names of the texts that are not the published ones of DeepSeek-V4 word for word. For information: another model of
    /// the family may have its own.
    #[must_use]
    pub fn unpublished(&self) -> Vec<&'static str> {
        let texts = [
            ("tools block", &self.tools, TOOLS_SHA256),
            ("response format", &self.response_format, RESPONSE_FORMAT_SHA256),
            ("effort prefix `high`", &self.high, HIGH_SHA256),
            ("effort prefix `max`", &self.max, MAX_SHA256),
        ];
        let differs = |text: &str, digest: &str| hex(&Sha256::digest(text.as_bytes())) != digest;
        let differing =
            texts.into_iter().filter(|(_, text, digest)| text.as_deref().is_some_and(|t| differs(t, digest)));
        differing.map(|(name, _, _)| name).collect()
    }

    pub(crate) fn tools(&self) -> Result<&str, PromptError> {
        self.need(self.tools.as_deref(), "text that offers tools")
    }

    pub(crate) fn response_format(&self) -> Result<&str, PromptError> {
        self.need(self.response_format.as_deref(), "text that asks for a response format")
    }

    pub(crate) fn effort(&self, effort: Effort) -> Result<&str, PromptError> {
        match effort {
            Effort::Low => Ok(""),
            Effort::High => self.need(self.high.as_deref(), "text that asks for high reasoning effort"),
            Effort::Max => self.need(self.max.as_deref(), "text that asks for maximal reasoning effort"),
        }
    }

    fn need<'a>(&self, text: Option<&'a str>, what: &'static str) -> Result<&'a str, PromptError> {
        text.ok_or_else(|| PromptError::MissingText {
            what,
            file: self.file.clone(),
            reason: self.problem.clone().unwrap_or_else(|| "it has no such text".to_owned()),
        })
    }
}

const TOOLS_SHA256: &str = "09b7269daaddbeaf11a3ed55c07b1846c35162b841d8b4301bbe0449879d1fd8";
const HIGH_SHA256: &str = "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7";
const MAX_SHA256: &str = "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c";
const RESPONSE_FORMAT_SHA256: &str = "012f31fcc1338bdfe25b132eaf56ab020ee75ab8e649f37b30b8e5f544fb17a5";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(file: &Path) -> Result<String, String> {
    let problem = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => "the file is missing".to_owned(),
        _ => error.to_string(),
    };
    let opened = File::open(file).map_err(problem)?;
    if !opened.metadata().map_err(problem)?.is_file() {
        return Err("it is not a file".to_owned());
    }
    let mut bytes = Vec::new();
    opened.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(problem)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("it is longer than {MAX_FILE_BYTES} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())
}

fn as_text(value: &Constant) -> Option<&str> {
    match value {
        Constant::Text(text) => Some(text),
        Constant::Table(_) => None,
    }
}

/// Effort prefixes by name: a table of them, or a constant for each.
fn efforts(constants: &BTreeMap<String, Constant>) -> BTreeMap<&str, &str> {
    let is_effort_table = |value: &&Constant| match value {
        Constant::Table(table) => ["high", "max"].iter().all(|name| table.iter().any(|(key, _)| key == name)),
        Constant::Text(_) => false,
    };
    let named = constants.get("REASONING_EFFORT_PROMPTS").filter(is_effort_table);
    if let Some(Constant::Table(table)) = named.or_else(|| constants.values().find(is_effort_table)) {
        return table.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    }
    let single = [("low", "REASONING_EFFORT_LOW"), ("high", "REASONING_EFFORT_HIGH"), ("max", "REASONING_EFFORT_MAX")];
    single.into_iter().filter_map(|(name, constant)| Some((name, as_text(constants.get(constant)?)?))).collect()
}
