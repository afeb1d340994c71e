//! The table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use super::round::Round;
use super::world::Held;

/// What the rounds of one kind showed.
#[derive(Debug, Default)]
pub(crate) struct Row {
    /// The kind.
    pub(crate) kind: String,
    /// Rounds run.
    pub(crate) rounds: usize,
    /// Rounds that showed something wrong.
    pub(crate) failed: usize,
    outcomes: BTreeMap<String, usize>,
    terminal: Duration,
    next: Duration,
    /// Processes beyond the daemon and one worker a stage, after the last round.
    pub(crate) surplus: usize,
}

impl Row {
    /// No rounds yet.
    pub(crate) fn new(kind: String) -> Self {
        Self { kind, ..Self::default() }
    }

    /// Counts a round that was as it should be.
    pub(crate) fn add(&mut self, round: &Round) {
        for outcome in &round.outcomes {
            *self.outcomes.entry(outcome.clone()).or_default() += 1;
        }
        self.terminal = self.terminal.max(round.terminal);
        self.next = self.next.max(round.next);
    }
}

/// Markdown.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| Kind | Rounds | Failed | Outcomes of the jobs | Worst time to the terminal event, ms | Worst time to the next success, ms | Processes left over |\n\
         |---|---:|---:|---|---:|---:|---:|\n",
    );
    for row in rows {
        let outcomes: Vec<String> = row.outcomes.iter().map(|(name, count)| format!("{count} {name}")).collect();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} |",
            row.kind,
            row.rounds,
            row.failed,
            outcomes.join(", "),
            row.terminal.as_millis(),
            row.next.as_millis(),
            row.surplus
        );
    }
    text
}

/// What one daemon held over its life.
#[derive(Debug, Default)]
pub(crate) struct Growth {
    samples: Vec<Held>,
}

impl Growth {
    /// One more look, when nothing runs.
    pub(crate) fn add(&mut self, held: Held) {
        self.samples.push(held);
    }

    /// KiB a round, by least squares over the second half of the rounds: the first fills caches and the allocator's arenas.
    pub(crate) fn slope(&self) -> f64 {
        let half = &self.samples[self.samples.len() / 2..];
        let count = half.len() as f64;
        if half.len() < 2 {
            return 0.0;
        }
        let at = |index: usize| index as f64 - (count - 1.0) / 2.0;
        let mean = half.iter().map(|held| held.memory).sum::<f64>() / count;
        let along: f64 = half.iter().enumerate().map(|(index, held)| at(index) * (held.memory - mean)).sum();
        let square: f64 = (0..half.len()).map(|index| at(index) * at(index)).sum();
        along / square
    }

    /// What grew more than noise explains.
    pub(crate) fn wrong(&self) -> Option<String> {
        let (first, last) = (self.samples.first()?, self.samples.last()?);
        // Some descriptors are open for a moment: a client's connection that has just ended, a worker that is being reaped.
        if last.descriptors > first.descriptors + 4 {
            return Some(format!("descriptors grew from {} to {}", first.descriptors, last.descriptors));
        }
        let grown = self.slope() * self.samples.len() as f64 / 2.0;
        (self.samples.len() >= 20 && grown > 4096.0)
            .then(|| format!("RssAnon grew by {grown:.0} KiB in the second half"))
    }

    /// One line.
    pub(crate) fn line(&self) -> String {
        let (Some(first), Some(last)) = (self.samples.first(), self.samples.last()) else { return String::new() };
        let most = self.samples.iter().map(|held| held.memory).fold(0.0, f64::max);
        format!(
            "One daemon over {} rounds: RssAnon {:.0} KiB before, {:.0} KiB after, {most:.0} KiB at most, slope over the second \
             half {:+.2} KiB a round; descriptors {} before, {} after.",
            self.samples.len() - 1,
            first.memory,
            last.memory,
            self.slope(),
            first.descriptors,
            last.descriptors
        )
    }
}
