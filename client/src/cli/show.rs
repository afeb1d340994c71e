//! Pictures in the terminal.

use std::io::IsTerminal as _;

use super::args::Show;

/// Most columns of a shown picture: enough to judge it, and the next prompt stays in sight.
const COLUMNS: u32 = 48;

/// How a terminal shows pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    /// Kitty's protocol.
    Kitty,
    /// iTerm's inline pictures.
    Iterm,
    /// Sixel.
    Sixel,
    /// Half blocks in colours.
    Blocks,
}

/// What is known of the terminal. From its variables alone: asking a terminal that does not answer would hang.
#[derive(Debug, Clone, Default)]
struct Terminal {
    stdout: bool,
    stdin: bool,
    term: String,
    program: String,
    colours: String,
    kitty: bool,
}

impl Terminal {
    fn of_environment() -> Self {
        let get = |name: &str| std::env::var(name).unwrap_or_default();
        Self {
            stdout: std::io::stdout().is_terminal(),
            stdin: std::io::stdin().is_terminal(),
            term: get("TERM"),
            program: get("TERM_PROGRAM"),
            colours: get("COLORTERM"),
            kitty: std::env::var_os("KITTY_WINDOW_ID").is_some(),
        }
    }

    fn method(&self, when: Show) -> Option<Method> {
        if when == Show::Never || !self.stdout || self.term == "dumb" {
            return None;
        }
        // A multiplexer does not let the protocols through.
        let multiplexed = self.term.starts_with("screen") || self.term.starts_with("tmux");
        let answers = self.stdin && !multiplexed;
        let knows = |words: &[&str]| words.iter().any(|word| self.term.contains(word) || self.program.contains(word));
        if answers && (knows(&["kitty", "ghostty"]) || self.kitty) {
            return Some(Method::Kitty);
        }
        if !multiplexed && knows(&["iTerm", "WezTerm", "wezterm", "mintty"]) {
            return Some(Method::Iterm);
        }
        if answers && knows(&["sixel", "foot", "mlterm", "yaft", "contour"]) {
            return Some(Method::Sixel);
        }
        let coloured =
            self.term.contains("256color") || self.colours.contains("truecolor") || self.colours.contains("24bit");
        (when == Show::Always || coloured).then_some(Method::Blocks)
    }
}

/// How to show pictures here, if at all.
pub(super) fn method(when: Show) -> Option<Method> {
    Terminal::of_environment().method(when)
}

/// Draws a PNG below the cursor. What the terminal makes of it is its affair: an error is only told.
pub(super) fn draw(method: Method, png: &[u8]) -> Result<(), String> {
    let image = image::load_from_memory(png).map_err(|error| error.to_string())?;
    let (columns, rows) = viuer::terminal_size();
    // Cells are about twice as high as wide; the picture, the summary and the next prompt shall fit.
    let room = u32::from(rows.saturating_sub(4)).max(4) * 2;
    let shape = f64::from(image.width()) / f64::from(image.height().max(1));
    let width = COLUMNS.min(u32::from(columns)).min((f64::from(room) * shape) as u32).max(1);
    let config = viuer::Config {
        transparent: true,
        absolute_offset: false,
        width: Some(width),
        use_kitty: method == Method::Kitty,
        use_iterm: method == Method::Iterm,
        use_sixel: method == Method::Sixel,
        ..Default::default()
    };
    viuer::print(&image, &config).map(|_| ()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terminal(term: &str, program: &str) -> Terminal {
        Terminal { stdout: true, stdin: true, term: term.into(), program: program.into(), ..Terminal::default() }
    }

    #[test]
    fn the_terminals_variables_choose_the_method() {
        for (term, program, method) in [
            ("xterm-kitty", "", Some(Method::Kitty)),
            ("xterm-ghostty", "ghostty", Some(Method::Kitty)),
            ("xterm-256color", "iTerm.app", Some(Method::Iterm)),
            ("xterm-256color", "WezTerm", Some(Method::Iterm)),
            ("foot", "", Some(Method::Sixel)),
            ("xterm-256color", "", Some(Method::Blocks)),
            ("tmux-256color", "iTerm.app", Some(Method::Blocks)),
            ("vt100", "", None),
            ("dumb", "", None),
        ] {
            assert_eq!(terminal(term, program).method(Show::Auto), method, "{term} {program}");
        }
        assert_eq!(terminal("vt100", "").method(Show::Always), Some(Method::Blocks));
        assert_eq!(terminal("xterm-kitty", "").method(Show::Never), None);
        assert_eq!(Terminal { stdout: false, ..terminal("xterm-kitty", "") }.method(Show::Always), None);
        let piped = Terminal { stdin: false, ..terminal("xterm-kitty", "") };
        assert_eq!(piped.method(Show::Auto), None, "it could not answer");
    }
}
