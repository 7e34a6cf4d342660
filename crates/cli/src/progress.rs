//! Progress bars on standard error, silent when it is not a terminal.

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

/// Work of unknown length.
pub(crate) fn spinner(message: String) -> ProgressBar {
    let spinner = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_message(message);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}
