//! CLIP's byte pair encoding, equal to transformers' `CLIPTokenizer` (version 5).

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, de::DeserializeOwned};
use tokenizers::{
    AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    models::bpe::{BPE, Vocab},
    normalizers::{Lowercase, NFC, Replace, Sequence as Normalizers, replace::ReplacePattern},
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence as PreTokenizers,
        split::{Split, SplitPattern},
    },
};

use super::TextError;

/// Where words begin and end: contractions, runs of letters, single digits, runs of anything else.
const WORDS: &str = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";

/// A CLIP tokenizer with its special tokens.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    begin: u32,
    end: u32,
    pad: u32,
    comma: Option<u32>,
}

/// `tokenizer_config.json` and `special_tokens_map.json`, of which the same keys matter.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Specials {
    bos_token: Option<Special>,
    eos_token: Option<Special>,
    unk_token: Option<Special>,
    pad_token: Option<Special>,
    added_tokens_decoder: Option<BTreeMap<u32, Added>>,
}

/// A special token by its text alone or with its properties.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Special {
    Text(String),
    Token(Added),
}

#[derive(Clone, Deserialize)]
struct Added {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

impl Added {
    fn token(&self, special: bool) -> AddedToken {
        AddedToken::from(self.content.as_str(), special || self.special)
            .single_word(self.single_word)
            .lstrip(self.lstrip)
            .rstrip(self.rstrip)
            .normalized(self.normalized)
    }
}

impl Specials {
    /// One special token: the map's unless the configuration lists added tokens (then transformers reads no map), CLIP's
    /// own by default. Properties come from the list where the token is named by its text.
    fn token(&self, map: &Self, of: fn(&Self) -> Option<&Special>, default: &str) -> AddedToken {
        let listed = self.added_tokens_decoder.as_ref();
        let found = if listed.is_some() { of(self) } else { of(map).or_else(|| of(self)) };
        let text = match found {
            Some(Special::Token(added)) => return added.token(true),
            Some(Special::Text(text)) => text.as_str(),
            None => default,
        };
        match listed.and_then(|listed| listed.values().find(|added| added.content == text)) {
            Some(added) => added.token(true),
            None => AddedToken::from(text, true),
        }
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a folder in the layout of the Hugging Face hub: `tokenizer.json`, or `vocab.json` and
    /// `merges.txt`; the special tokens from `tokenizer_config.json` and `special_tokens_map.json` where they are there.
    ///
    /// # Errors
    /// Missing, unreadable or malformed files, by name.
    pub fn load(folder: &Path) -> Result<Self, TextError> {
        let config: Specials = optional(&folder.join("tokenizer_config.json"))?;
        let map: Specials = optional(&folder.join("special_tokens_map.json"))?;
        let specials = [
            config.token(&map, |s| s.bos_token.as_ref(), "<|startoftext|>"),
            config.token(&map, |s| s.eos_token.as_ref(), "<|endoftext|>"),
            config.token(&map, |s| s.unk_token.as_ref(), "<|endoftext|>"),
            config.token(&map, |s| s.pad_token.as_ref(), "<|endoftext|>"),
        ];
        let whole = folder.join("tokenizer.json");
        let (vocabulary, merges) = (folder.join("vocab.json"), folder.join("merges.txt"));
        let (mut inner, source) = if whole.is_file() {
            let bytes = read(&whole)?;
            let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| malformed(&whole, error))?;
            (inner, whole)
        } else if vocabulary.is_file() || merges.is_file() {
            let words: HashMap<String, u32> =
                serde_json::from_slice(&read(&vocabulary)?).map_err(|error| malformed(&vocabulary, error))?;
            let pairs = merge_pairs(&merges)?;
            (build(words, pairs, &specials[2].content).map_err(|error| malformed(&merges, error))?, vocabulary)
        } else {
            return Err(TextError::Missing { folder: folder.to_owned() });
        };
        let listed = config.added_tokens_decoder.unwrap_or_default();
        inner.add_tokens(listed.values().map(|added| added.token(false))).map_err(|error| malformed(&source, error))?;
        for special in &specials {
            if inner.token_to_id(&special.content).is_none() {
                return Err(malformed(
                    &source,
                    format!("the special token `{}` is not in the vocabulary", special.content),
                ));
            }
        }
        inner.add_special_tokens(specials.iter().cloned()).map_err(|error| malformed(&source, error))?;
        let id = |special: &AddedToken| inner.token_to_id(&special.content).unwrap_or_default();
        let (begin, end, pad) = (id(&specials[0]), id(&specials[1]), id(&specials[3]));
        let comma = inner.token_to_id(",</w>");
        // Windows are cut and padded here, not by the file's own settings.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| malformed(&source, error))?;
        Ok(Self { inner, begin, end, pad, comma })
    }

    /// The ids of a text, without begin, end and padding; of any length.
    ///
    /// # Errors
    /// A failure inside the tokenizer; no text is known to cause one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| TextError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The id that begins every window.
    pub fn begin(&self) -> u32 {
        self.begin
    }

    /// The id that ends every window's text.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// The id that fills windows after their end: the end's in SD1, that of `!` in SD2 and SDXL's second encoder.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// The id of a comma as a word, where a prompt may be cut.
    pub fn comma(&self) -> Option<u32> {
        self.comma
    }

    /// Ids in the vocabulary, added tokens included.
    pub fn vocabulary_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

/// CLIP's pipeline over a vocabulary: composed characters, single blanks, lower case, words, bytes, pairs.
fn build(
    words: HashMap<String, u32>,
    pairs: Vec<(String, String)>,
    unknown: &str,
) -> tokenizers::Result<tokenizers::Tokenizer> {
    let words: Vocab = words.into_iter().collect();
    let model = BPE::builder()
        .vocab_and_merges(words, pairs)
        .unk_token(unknown.to_owned())
        .continuing_subword_prefix(String::new())
        .end_of_word_suffix("</w>".to_owned())
        .build()?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_normalizer(Some(Normalizers::new(vec![
        NormalizerWrapper::from(NFC),
        NormalizerWrapper::from(Replace::new(ReplacePattern::Regex(r"\s+".into()), " ")?),
        NormalizerWrapper::from(Lowercase),
    ])))?;
    let split = Split::new(SplitPattern::Regex(WORDS.into()), SplitDelimiterBehavior::Removed, true)?;
    tokenizer.with_pre_tokenizer(Some(PreTokenizers::new(vec![
        PreTokenizerWrapper::from(split),
        PreTokenizerWrapper::from(ByteLevel::new(false, true, true)),
    ])));
    Ok(tokenizer)
}

/// The pairs of `merges.txt`, most frequent first.
fn merge_pairs(path: &Path) -> Result<Vec<(String, String)>, TextError> {
    let text = String::from_utf8(read(path)?).map_err(|error| malformed(path, error))?;
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.is_empty() && !line.starts_with("#version"))
        .map(|(number, line)| {
            line.split_once(' ')
                .map(|(left, right)| (left.to_owned(), right.to_owned()))
                .ok_or_else(|| malformed(path, format!("line {} has no pair", number + 1)))
        })
        .collect()
}

fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    fs::read(path).map_err(|source| TextError::Read { path: path.to_owned(), source })
}

/// A file that need not be there.
fn optional<T: DeserializeOwned + Default>(path: &PathBuf) -> Result<T, TextError> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| malformed(path, error)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(T::default()),
        Err(source) => Err(TextError::Read { path: path.clone(), source }),
    }
}

fn malformed(path: &Path, reason: impl ToString) -> TextError {
    TextError::Malformed { path: path.to_owned(), reason: reason.to_string() }
}
