//! Values as people write them: bytes ("8GiB") and spans of time ("500ms").

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};

/// A number of bytes: a whole number, or a number with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// A span of time: a number with a unit (ms, s, m, h), or seconds without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

/// Splits "1.5GiB" into its number and its unit.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    Some((number, text[end..].trim()))
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a size: write a number of bytes, or one with a unit, as in \"8GiB\"");
        let (number, unit) = split(text).ok_or_else(wrong)?;
        let scale: f64 = match unit {
            "" | "B" => 1.0,
            "kB" | "KB" => 1e3,
            "MB" => 1e6,
            "GB" => 1e9,
            "TB" => 1e12,
            "K" | "KiB" => 1024.0,
            "M" | "MiB" => 1_048_576.0,
            "G" | "GiB" => 1_073_741_824.0,
            "T" | "TiB" => 1_099_511_627_776.0,
            _ => return Err(wrong()),
        };
        let bytes = number * scale;
        if bytes > 1e18 { Err(wrong()) } else { Ok(Self(bytes as u64)) }
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a span of time: write a number with a unit, as in \"500ms\", \"3s\" or \"2m\"");
        let (number, unit) = split(text).ok_or_else(wrong)?;
        let seconds = match unit {
            "ms" => number / 1000.0,
            "" | "s" => number,
            "m" | "min" => number * 60.0,
            "h" => number * 3600.0,
            _ => return Err(wrong()),
        };
        Duration::try_from_secs_f64(seconds).map(Self).map_err(|_| wrong())
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, scale) in [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
            if self.0 >= scale && self.0.is_multiple_of(scale) {
                return write!(f, "{}{unit}", self.0 / scale);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        if millis.is_multiple_of(1000) { write!(f, "{}s", millis / 1000) } else { write!(f, "{millis}ms") }
    }
}

pub(super) struct Text<T>(pub(super) std::marker::PhantomData<T>, pub(super) &'static str);

impl<T: FromStr<Err = String>> Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.1)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<T, E> {
        value.to_string().parse().map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<T, E> {
        value.to_string().parse().map_err(E::custom)
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<T, E> {
        value.to_string().parse().map_err(E::custom)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<T, E> {
        value.parse().map_err(E::custom)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Text(std::marker::PhantomData, "a number of bytes or a size as in \"8GiB\""))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Text(std::marker::PhantomData, "a span of time as in \"500ms\" or \"3s\""))
    }
}

/// One text or several.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(untagged)]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl OneOrMany {
    /// All of them.
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_spans_are_read_and_printed() {
        for (text, bytes, printed) in [
            ("8GiB", 8 << 30, "8GiB"),
            ("1.5 GiB", 3 << 29, "1536MiB"),
            ("1000", 1000, "1000"),
            ("2MB", 2_000_000, "2000000"),
            ("512 MiB", 512 << 20, "512MiB"),
        ] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!((size.0, size.to_string().as_str()), (bytes, printed), "{text}");
        }
        for (text, millis, printed) in
            [("500ms", 500, "500ms"), ("3s", 3000, "3s"), ("2m", 120_000, "120s"), ("1.5", 1500, "1500ms")]
        {
            let span: Span = text.parse().unwrap();
            assert_eq!((span.0.as_millis(), span.to_string().as_str()), (millis, printed), "{text}");
        }
        for text in ["", "GiB", "8 parsecs", "-1", "1e9GB", "99999999999TiB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        for text in ["", "soon", "3 days", "-1s", "1ns"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }
}
