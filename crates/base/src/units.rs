//! Sizes and rates as people read them.

/// `bytes` with a binary prefix: `7.3 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// A count with a decimal prefix: `284 G`, `10.2 M`.
pub fn human_count(count: u64) -> String {
    scaled(count as f64, 1000.0, &["", "K", "M", "G", "T", "P"]).trim_end().to_owned()
}

fn scaled(mut value: f64, base: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // 0.9995 of the next unit would print as "1000" or "1024".
    while value >= base * 0.9995 && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let decimals = if unit == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.decimals$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_naturally() {
        assert_eq!(human_bytes(0), "0 B");
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(7_838_315_315), "7.3 GiB");
        assert_eq!(human_count(284_000_000_000), "284 G");
        assert_eq!(human_count(10_200_000), "10.2 M");
        assert_eq!(human_count(12), "12");
    }
}
