//! `troika launch`: a coding client, told where the server is.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use serde_json::json;

/// What stands for a key where a server asks for none: clients want some key.
const NO_KEY: &str = "none";

/// Start a coding client on a running server, or print what it needs.
///
/// Without --print the client takes this command's place, with its environment set; arguments after `--` go to it.
/// Nothing is written to any of its files.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which client.
    #[arg(value_enum)]
    client: Client,
    /// Print the environment and the command instead, for a shell or to read.
    #[arg(long)]
    print: bool,
    /// Where the server is.
    #[arg(long, default_value = "http://127.0.0.1:8080", value_name = "URL")]
    url: String,
    /// The model's name, as the server's /v1/models says it.
    #[arg(long, default_value = "nano", value_name = "NAME")]
    model: String,
    /// A key of the server, if it has any.
    #[arg(long, env = "TROIKA_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    /// Arguments for the client.
    #[arg(last = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Client {
    /// Claude Code, over /v1/messages.
    Claude,
    /// Codex, over /v1/responses.
    Codex,
    /// OpenCode, over /v1/chat/completions.
    Opencode,
    /// Aider, over /v1/chat/completions.
    Aider,
    /// Anything that reads OPENAI_BASE_URL and OPENAI_API_KEY; can only be printed.
    Openai,
    /// Anything that reads ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN; can only be printed.
    Anthropic,
}

/// How a client is started.
struct Plan {
    program: Option<&'static str>,
    environment: Vec<(&'static str, String)>,
    arguments: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let plan = plan(args.client, args.url.trim_end_matches('/'), &args.model, args.api_key.as_deref());
    if args.print {
        print!("{}", describe(&plan));
        return Ok(ExitCode::SUCCESS);
    }
    let program = plan.program.context("this is no program: use --print, and set what it says in your client")?;
    ensure!(!args.url.is_empty(), "--url is empty");
    let mut command = Command::new(program);
    command.args(&plan.arguments).args(&args.args).envs(plan.environment.iter().map(|(name, value)| (name, value)));
    start(command).with_context(|| format!("cannot start `{program}`; is it installed?"))
}

/// Becomes the client, so that signals and the terminal are its own.
#[cfg(unix)]
fn start(mut command: Command) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt;
    Err(command.exec().into())
}

#[cfg(not(unix))]
fn start(mut command: Command) -> Result<ExitCode> {
    let status = command.status()?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

fn plan(client: Client, url: &str, model: &str, key: Option<&str>) -> Plan {
    let api = format!("{url}/v1");
    let shown_key = key.unwrap_or(NO_KEY).to_owned();
    let openai = vec![("OPENAI_BASE_URL", api.clone()), ("OPENAI_API_KEY", shown_key.clone())];
    let anthropic = vec![("ANTHROPIC_BASE_URL", url.to_owned()), ("ANTHROPIC_AUTH_TOKEN", shown_key.clone())];
    let (program, environment, arguments) = match client {
        Client::Openai => (None, openai, Vec::new()),
        Client::Anthropic => (None, anthropic, Vec::new()),
        Client::Claude => {
            let mut environment = anthropic;
            // It asks for several models by task; here there is one.
            for name in [
                "ANTHROPIC_MODEL",
                "ANTHROPIC_DEFAULT_OPUS_MODEL",
                "ANTHROPIC_DEFAULT_SONNET_MODEL",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                "ANTHROPIC_SMALL_FAST_MODEL",
                "CLAUDE_CODE_SUBAGENT_MODEL",
            ] {
                environment.push((name, model.to_owned()));
            }
            environment.push(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".to_owned()));
            (Some("claude"), environment, Vec::new())
        }
        Client::Codex => {
            let quoted = |text: &str| json!(text).to_string();
            let provider = format!(
                "model_providers.troika={{name=\"Troika\", base_url={}, env_key=\"TROIKA_API_KEY\", wire_api=\"responses\"}}",
                quoted(&api)
            );
            let settings = [
                provider,
                "model_provider=\"troika\"".into(),
                format!("model={}", quoted(model)),
                "web_search=\"disabled\"".into(),
                // Its tools come in a `namespace`, which we do not know.
                "features.multi_agent=false".into(),
            ];
            let arguments = settings.into_iter().flat_map(|setting| ["-c".to_owned(), setting]).collect();
            (Some("codex"), vec![("TROIKA_API_KEY", shown_key)], arguments)
        }
        Client::Opencode => {
            let config = json!({
                "model": format!("troika/{model}"),
                "provider": {"troika": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "Troika",
                    "options": {"baseURL": api, "apiKey": "{env:TROIKA_API_KEY}"},
                    "models": {model: {"name": model}},
                }},
            });
            let environment = vec![("TROIKA_API_KEY", shown_key), ("OPENCODE_CONFIG_CONTENT", config.to_string())];
            (Some("opencode"), environment, Vec::new())
        }
        Client::Aider => {
            let environment = vec![("OPENAI_API_BASE", api), ("OPENAI_API_KEY", shown_key)];
            (Some("aider"), environment, vec!["--model".to_owned(), format!("openai/{model}")])
        }
    };
    Plan { program, environment, arguments }
}

/// Lines for a shell.
fn describe(plan: &Plan) -> String {
    let mut lines: Vec<String> =
        plan.environment.iter().map(|(name, value)| format!("export {name}={}", shell(value))).collect();
    if let Some(program) = plan.program {
        let words = plan.arguments.iter().map(|word| shell(word));
        lines.push([program.to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" "));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// A word that a shell takes as it is.
fn shell(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@=,".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_client_learns_url_model_and_key() {
        for client in Client::value_variants() {
            let text = describe(&plan(*client, "http://box:1", "the model", Some("sk-1")));
            assert!(text.contains("http://box:1") && text.contains("sk-1"), "{client:?}: {text}");
            let is_program = !matches!(client, Client::Openai | Client::Anthropic);
            assert_eq!(text.contains("the model"), is_program, "{client:?}: {text}");
        }
        let text = describe(&plan(Client::Openai, "http://box:1", "m", None));
        assert_eq!(text, "export OPENAI_BASE_URL=http://box:1/v1\nexport OPENAI_API_KEY=none\n");
        let text = describe(&plan(Client::Claude, "http://box:1", "m", None));
        assert!(text.starts_with("export ANTHROPIC_BASE_URL=http://box:1\n"), "{text}");
        assert!(text.ends_with("claude\n"), "{text}");
    }

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(shell("a-b"), "a-b");
        assert_eq!(shell("it's"), r"'it'\''s'");
        assert_eq!(shell(""), "''");
    }
}
