//! Progress on standard error: bars, which are silent when it is not a terminal, and steps, which are lines then.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar over `total` units, shown as `template` says.
fn bar(total: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template(template).expect("our own template is valid"));
    bar
}

/// Bytes written or read.
pub(crate) fn bytes(message: &'static str, total: u64) -> ProgressBar {
    bar(total, "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}").with_message(message)
}

/// Tokens computed.
pub(crate) fn tokens(message: &'static str, total: u64) -> ProgressBar {
    bar(total, "{msg} {wide_bar} {pos}/{len} tokens {per_sec} {eta}").with_message(message)
}

/// Steps of something that says what it does.
pub(crate) fn steps(total: u64) -> ProgressBar {
    bar(total, "{msg} {wide_bar} {pos}/{len} {eta}")
}

/// Steps of minutes or hours, each of which says what it is: a bar, and lines in a log, where one wants to know how far it is too.
pub(crate) struct Steps {
    /// On a terminal.
    bar: Option<ProgressBar>,
    /// The last line.
    said: String,
}

impl Steps {
    pub(crate) fn new() -> Self {
        Self { bar: std::io::stderr().is_terminal().then(|| steps(0)), said: String::new() }
    }

    /// `what` begins, with `done` of `of` behind it.
    pub(crate) fn show(&mut self, done: usize, of: usize, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_length(of as u64);
            bar.set_position(done as u64);
            bar.set_message(what.to_owned());
        } else if self.said != what {
            eprintln!("{what} ({done} of {of} done)");
            what.clone_into(&mut self.said);
        }
    }

    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Work of unknown length.
pub(crate) fn spinner(message: String) -> ProgressBar {
    let spinner = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_message(message);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}
