//! Windows of 77 ids: begin, 75 of text, end. A longer prompt fills several, whose encodings are joined; where one is
//! full the cut goes back to a comma near its end, as in the web UIs.

use super::{Emphasis, Fragment, TextError, Tokenizer, parse};

/// Ids of a window.
pub const WINDOW: usize = 77;
/// Ids of text in a window.
pub const CHUNK_TOKENS: usize = WINDOW - 2;
/// Windows of one prompt at most.
pub const MAX_CHUNKS: usize = 64;
/// How far back a comma is looked for.
const COMMA_REACH: usize = 20;
/// Bytes of a prompt at most; far more than fill the windows.
const MAX_BYTES: usize = 256 * 1024;

/// A window's ids and their weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// Begin, text, end, padding.
    pub ids: [u32; WINDOW],
    /// 1 for all but emphasized text.
    pub weights: [f32; WINDOW],
}

impl Chunk {
    /// The window of an empty prompt.
    pub fn empty(tokenizer: &Tokenizer) -> Self {
        Self::new(tokenizer, &[])
    }

    /// Whether every weight is 1.
    pub fn is_plain(&self) -> bool {
        self.weights.iter().all(|&weight| weight == 1.0)
    }

    fn new(tokenizer: &Tokenizer, text: &[(u32, f32)]) -> Self {
        let mut ids = [tokenizer.pad(); WINDOW];
        let mut weights = [1.0; WINDOW];
        ids[0] = tokenizer.begin();
        for (i, &(id, weight)) in text.iter().enumerate() {
            ids[i + 1] = id;
            weights[i + 1] = weight;
        }
        ids[text.len() + 1] = tokenizer.end();
        Self { ids, weights }
    }
}

/// A prompt as windows, at least one. A prompt of up to 75 tokens without emphasis gives transformers' padded ids.
///
/// # Errors
/// A prompt that is too long, with the limit.
pub fn chunks(tokenizer: &Tokenizer, prompt: &str, emphasis: Emphasis) -> Result<Vec<Chunk>, TextError> {
    if prompt.len() > MAX_BYTES {
        return Err(TextError::TooLong { found: prompt.len(), limit: MAX_BYTES, unit: "bytes" });
    }
    let fragments = match emphasis {
        Emphasis::WebUi => parse(prompt),
        Emphasis::Off => vec![Fragment::Text { text: prompt.to_owned(), weight: 1.0 }],
    };
    let mut cutter = Cutter { tokenizer, done: Vec::new(), open: Vec::new(), comma: None };
    let mut tokens = 0;
    for fragment in &fragments {
        match fragment {
            Fragment::Break => cutter.close(),
            Fragment::Text { text, weight } => {
                let ids = tokenizer.encode(text)?;
                tokens += ids.len();
                for id in ids {
                    cutter.push(id, *weight as f32);
                }
            }
        }
    }
    if !cutter.open.is_empty() || cutter.done.is_empty() {
        cutter.close();
    }
    match cutter.done.len() {
        found if found > MAX_CHUNKS && tokens <= MAX_CHUNKS * CHUNK_TOKENS => {
            Err(TextError::TooLong { found, limit: MAX_CHUNKS, unit: "windows" })
        }
        found if found > MAX_CHUNKS => {
            Err(TextError::TooLong { found: tokens, limit: MAX_CHUNKS * CHUNK_TOKENS, unit: "tokens" })
        }
        _ => Ok(cutter.done),
    }
}

/// Makes a prompt and its negative as many windows, with empty ones, so that they can be guided together.
pub fn equalize(tokenizer: &Tokenizer, prompt: &mut Vec<Chunk>, negative: &mut Vec<Chunk>) {
    let most = prompt.len().max(negative.len());
    prompt.resize(most, Chunk::empty(tokenizer));
    negative.resize(most, Chunk::empty(tokenizer));
}

struct Cutter<'a> {
    tokenizer: &'a Tokenizer,
    done: Vec<Chunk>,
    open: Vec<(u32, f32)>,
    /// Where the open window's last comma stands.
    comma: Option<usize>,
}

impl Cutter<'_> {
    fn push(&mut self, id: u32, weight: f32) {
        let is_comma = Some(id) == self.tokenizer.comma();
        if is_comma {
            self.comma = Some(self.open.len());
        }
        if self.open.len() == CHUNK_TOKENS {
            // A comma that would begin the next window does so; text after a near comma moves with it.
            let near = self.comma.filter(|&comma| !is_comma && self.open.len() - comma <= COMMA_REACH);
            let moved = near.map(|comma| self.open.split_off(comma + 1)).unwrap_or_default();
            self.close();
            self.open = moved;
        }
        self.open.push((id, weight));
    }

    fn close(&mut self) {
        self.done.push(Chunk::new(self.tokenizer, &self.open));
        self.open.clear();
        self.comma = None;
    }
}
