//! Numbers for people, and text from elsewhere made safe for a terminal.

use std::borrow::Cow;
use std::time::Duration;

/// Bytes in binary units with three digits: "1.50 GiB".
pub(super) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 999.95 would print as four digits.
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// A duration with the precision that a person cares about: "85 ms", "2.4 s", "3 min 5 s", "2 h 10 min", "4 d 3 h".
pub(super) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 if duration < Duration::from_millis(1) => format!("{} µs", duration.as_micros()),
        0 if duration < Duration::from_micros(999_500) => format!("{:.0} ms", duration.as_secs_f64() * 1e3),
        0..60 if duration < Duration::from_millis(59_950) => format!("{:.1} s", duration.as_secs_f64()),
        0..3600 => format!("{} min {} s", seconds.max(60) / 60, seconds.max(60) % 60),
        3600..86400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// A duration from the wire; absent or negative ones are zero.
pub(super) fn wire_duration(duration: Option<&prost_types::Duration>) -> Duration {
    duration.and_then(|d| Duration::try_from(*d).ok()).unwrap_or_default()
}

/// Reads "30s", "5m", "1h", "250ms" or a number of seconds.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let refused = || format!("{text:?} is not a duration: write 30s, 5m or 1h");
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let number: f64 = text[..split].trim().parse().map_err(|_| refused())?;
    let scale = match &text[split..] {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err(refused()),
    };
    Duration::try_from_secs_f64(number * scale).map_err(|_| refused())
}

/// `1 picture`, `2 pictures`.
pub(super) fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Characters that steer a terminal or turn text around, and so do not belong in what others wrote.
fn steers(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text from elsewhere on one line: whatever steers a terminal is shown as `\u{1b}`, line ends as `\n`.
pub(super) fn line(text: &str) -> Cow<'_, str> {
    escape(text, false)
}

/// Text from elsewhere that may have several lines.
pub(super) fn lines(text: &str) -> Cow<'_, str> {
    escape(text, true)
}

fn escape(text: &str, keep_lines: bool) -> Cow<'_, str> {
    let kept = |c: char| keep_lines && c == '\n';
    if !text.chars().any(|c| steers(c) && !kept(c)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if kept(c) => out.push(c),
            '\n' | '\t' | '\r' => out.extend(c.escape_default()),
            c if steers(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// At most `width` characters of one line; a longer text ends in "…".
pub(super) fn shorten(text: &str, width: usize) -> String {
    let text = line(text);
    if text.chars().count() <= width {
        return text.into_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_three_digits() {
        for (number, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (10 << 20, "10.0 MiB"),
            (1023 << 20, "1.00 GiB"),
            (139 << 30, "139 GiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(bytes(number), text);
        }
    }

    #[test]
    fn durations_are_short() {
        for (milliseconds, text) in [
            (0.25, "250 µs"),
            (85.2, "85 ms"),
            (999.9, "1.0 s"),
            (2_440.0, "2.4 s"),
            (59_990.0, "1 min 0 s"),
            (185_000.0, "3 min 5 s"),
            (7_800_000.0, "2 h 10 min"),
            (356_400_000.0, "4 d 3 h"),
        ] {
            assert_eq!(duration(Duration::from_secs_f64(milliseconds / 1e3)), text);
        }
        assert_eq!(parse_duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert!(parse_duration("-1s").is_err() && parse_duration("1 fortnight").is_err());
    }

    #[test]
    fn what_steers_a_terminal_is_shown_and_not_obeyed() {
        assert_eq!(line("a cat"), "a cat");
        assert_eq!(line("\u{1b}[2Jx\u{7}\n"), "\\u{1b}[2Jx\\u{7}\\n");
        assert_eq!(lines("one\ntwo\r\u{9b}"), "one\ntwo\\r\\u{9b}");
        assert_eq!(line("\u{202e}gnp.exe"), "\\u{202e}gnp.exe");
        assert_eq!(line("naïve 猫 🎂"), "naïve 猫 🎂");
        assert_eq!(shorten("a birthday cake", 8), "a birth…");
    }
}
