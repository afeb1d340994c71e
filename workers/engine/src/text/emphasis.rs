//! The web UIs' prompt syntax: `(word)` weighs 1.1 times as much, `[word]` as much less, `(word:1.2)` by the number, all
//! nested at will; a backslash takes a bracket's meaning away; `BREAK` begins a new window. Brackets left open reach to
//! the end of the prompt, and closing ones without a partner are text.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::TextError;

/// What a pair of round brackets multiplies weights by.
const ROUND: f64 = 1.1;
/// What a pair of square brackets multiplies weights by.
const SQUARE: f64 = 1.0 / 1.1;
/// The word that begins a new window.
const BREAK: &str = "BREAK";

/// Whether a prompt's brackets mean something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Emphasis {
    /// As in AUTOMATIC1111's web UI and those after it.
    #[default]
    WebUi,
    /// The prompt is taken literally.
    Off,
}

impl fmt::Display for Emphasis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WebUi => "web_ui",
            Self::Off => "off",
        })
    }
}

impl FromStr for Emphasis {
    type Err = TextError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name.to_ascii_lowercase().replace('-', "_").as_str() {
            "web_ui" | "webui" | "on" | "original" => Ok(Self::WebUi),
            "off" | "none" | "literal" => Ok(Self::Off),
            _ => Err(TextError::UnknownEmphasis(name.to_owned())),
        }
    }
}

/// A piece of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum Fragment {
    /// Text of one weight.
    Text {
        /// As it is tokenized.
        text: String,
        /// 1 is neutral.
        weight: f64,
    },
    /// The rest goes into a new window.
    Break,
}

/// Reads a prompt with emphasis into fragments; neighbours of the same weight are one. An empty prompt is one empty text.
pub fn parse(prompt: &str) -> Vec<Fragment> {
    let mut parser = Parser::default();
    let mut rest = prompt;
    while let Some(first) = rest.chars().next() {
        let taken = parser.take(first, rest);
        rest = &rest[taken..];
    }
    parser.finish()
}

#[derive(Default)]
struct Parser {
    fragments: Vec<Fragment>,
    /// Where each open bracket's contents begin.
    round: Vec<usize>,
    square: Vec<usize>,
}

impl Parser {
    /// Takes what the text begins with and says how many bytes that was.
    fn take(&mut self, first: char, text: &str) -> usize {
        match first {
            '\\' => {
                // A backslash before anything else is dropped.
                let escaped = text[1..].chars().next().filter(|c| matches!(c, '(' | ')' | '[' | ']' | '\\'));
                let escaped = escaped.map(String::from).unwrap_or_default();
                let taken = 1 + escaped.len();
                self.push(escaped);
                taken
            }
            '(' => {
                self.round.push(self.fragments.len());
                1
            }
            '[' => {
                self.square.push(self.fragments.len());
                1
            }
            ':' => match closing_weight(text) {
                Some((weight, taken)) => {
                    match (self.round.pop(), weight) {
                        (Some(start), weight) => self.multiply(start, weight),
                        (None, _) => self.push(text[..taken].to_owned()),
                    }
                    taken
                }
                None => {
                    self.push(":".into());
                    1
                }
            },
            ')' => {
                match self.round.pop() {
                    Some(start) => self.multiply(start, ROUND),
                    None => self.push(")".into()),
                }
                1
            }
            ']' => {
                match self.square.pop() {
                    Some(start) => self.multiply(start, SQUARE),
                    None => self.push("]".into()),
                }
                1
            }
            _ => {
                let end = text.find(['\\', '(', ')', '[', ']', ':']).unwrap_or(text.len());
                for (i, part) in split_at_breaks(&text[..end]).into_iter().enumerate() {
                    if i > 0 {
                        self.fragments.push(Fragment::Break);
                    }
                    self.push(part.to_owned());
                }
                end
            }
        }
    }

    fn push(&mut self, text: String) {
        self.fragments.push(Fragment::Text { text, weight: 1.0 });
    }

    fn multiply(&mut self, start: usize, factor: f64) {
        for fragment in &mut self.fragments[start..] {
            match fragment {
                Fragment::Text { weight, .. } => *weight *= factor,
                Fragment::Break => {}
            }
        }
    }

    fn finish(mut self) -> Vec<Fragment> {
        for start in std::mem::take(&mut self.round) {
            self.multiply(start, ROUND);
        }
        for start in std::mem::take(&mut self.square) {
            self.multiply(start, SQUARE);
        }
        let mut merged: Vec<Fragment> = Vec::new();
        for fragment in self.fragments {
            match (merged.last_mut(), fragment) {
                (_, Fragment::Text { text, .. }) if text.is_empty() => {}
                (Some(Fragment::Text { text: before, weight: same }), Fragment::Text { text, weight })
                    if *same == weight =>
                {
                    before.push_str(&text);
                }
                (_, fragment) => merged.push(fragment),
            }
        }
        if merged.is_empty() {
            merged.push(Fragment::Text { text: String::new(), weight: 1.0 });
        }
        merged
    }
}

/// A text that begins with `:1.2)`, blanks allowed around the number: the number, and the bytes up to the bracket's end.
/// What looks like a number but is none (`1.2.3`) is text.
fn closing_weight(text: &str) -> Option<(f64, usize)> {
    let body = text[1..].trim_start();
    let digits = body.strip_prefix(['+', '-']).unwrap_or(body);
    let length = digits.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(digits.len());
    let number = &body[..body.len() - digits.len() + length];
    let after = body[number.len()..].trim_start().strip_prefix(')')?;
    let weight = number.parse::<f64>().ok().filter(|weight| weight.is_finite())?;
    Some((weight, text.len() - after.len()))
}

/// Splits a text at the word `BREAK`, without the blanks around it.
fn split_at_breaks(text: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut parts, mut start, mut from) = (Vec::new(), 0, 0);
    while let Some(found) = text[from..].find(BREAK) {
        let (begin, end) = (from + found, from + found + BREAK.len());
        from = end;
        let apart = !text[..begin].ends_with(is_word) && !text[end..].starts_with(is_word);
        if apart {
            parts.push(if start == 0 { text[..begin].trim_end() } else { text[start..begin].trim() });
            start = end;
        }
    }
    parts.push(if start == 0 { text } else { text[start..].trim_start() });
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_parses(prompt: &str, expected: &[(&str, f64)]) {
        let found = parse(prompt);
        assert_eq!(found.len(), expected.len(), "{prompt}: {found:?}");
        for (fragment, (text, weight)) in found.iter().zip(expected) {
            match fragment {
                Fragment::Text { text: found, weight: w } => {
                    assert_eq!(found, text, "{prompt}");
                    assert!((w - weight).abs() < 1e-12, "{prompt}: {text} weighs {w}");
                }
                Fragment::Break => assert_eq!(*text, BREAK, "{prompt}"),
            }
        }
    }

    #[test]
    fn documented_examples_of_the_web_ui() {
        assert_parses("normal text", &[("normal text", 1.0)]);
        assert_parses("an (important) word", &[("an ", 1.0), ("important", 1.1), (" word", 1.0)]);
        assert_parses("(unbalanced", &[("unbalanced", 1.1)]);
        assert_parses(r"\(literal\]", &[("(literal]", 1.0)]);
        assert_parses("(unnecessary)(parens)", &[("unnecessaryparens", 1.1)]);
        assert_parses(
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            &[
                ("a ", 1.0),
                ("house", 1.3 * 1.1 * 1.1),
                (" ", 1.1),
                ("on", 1.0),
                (" a ", 1.1),
                ("hill", 0.55),
                (", sun, ", 1.1),
                ("sky", 1.1f64.powi(4)),
                (".", 1.1),
            ],
        );
    }

    #[test]
    fn nested_and_signed_weights() {
        assert_parses("[[dim]]", &[("dim", 1.0 / 1.1 / 1.1)]);
        assert_parses("(a (b:2) c:0.5)", &[("a ", 0.5), ("b", 1.0), (" c", 0.5)]);
        assert_parses("(x: +1.5 )", &[("x", 1.5)]);
        assert_parses("(x:-.5)", &[("x", -0.5)]);
    }

    #[test]
    fn what_is_no_emphasis_is_text() {
        assert_parses("", &[("", 1.0)]);
        assert_parses("()", &[("", 1.0)]);
        assert_parses("a) b]", &[("a) b]", 1.0)]);
        assert_parses("ratio 16:9, x:1.2)", &[("ratio 16:9, x:1.2)", 1.0)]);
        assert_parses("(a:1.2.3)", &[("a:1.2.3", 1.1)]);
        assert_parses("(a:b)", &[("a:b", 1.1)]);
        assert_parses(r"c:\dir \\ end\", &[(r"c:dir \ end", 1.0)]);
        assert_parses("[a:1.2]", &[("a:1.2", 1.0 / 1.1)]);
    }

    #[test]
    fn breaks_are_words_of_their_own() {
        assert_parses("a BREAK b", &[("a", 1.0), (BREAK, 0.0), ("b", 1.0)]);
        assert_parses("BREAKING aBREAK BREAK_", &[("BREAKING aBREAK BREAK_", 1.0)]);
        assert_parses("break", &[("break", 1.0)]);
        assert_parses("(a BREAK b)", &[("a", 1.1), (BREAK, 0.0), ("b", 1.1)]);
        assert_parses("BREAK,BREAK", &[(BREAK, 0.0), (",", 1.0), (BREAK, 0.0)]);
    }

    #[test]
    fn modes_read_back() {
        for mode in [Emphasis::WebUi, Emphasis::Off] {
            assert_eq!(mode.to_string().parse::<Emphasis>().unwrap(), mode);
        }
        assert!("loud".parse::<Emphasis>().unwrap_err().to_string().contains("web_ui"));
    }
}
