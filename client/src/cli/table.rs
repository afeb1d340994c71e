//! Tables with aligned columns.

use super::human;

/// Rows under a heading; every cell is made safe for a terminal.
#[derive(Debug)]
pub(super) struct Table {
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A heading; those that begin with ">" are of numbers, set to the right.
    pub(super) fn new(heading: &[&str]) -> Self {
        let right = heading.iter().map(|text| text.starts_with('>')).collect();
        Self { right, rows: vec![heading.iter().map(|text| text.trim_start_matches('>').to_owned()).collect()] }
    }

    /// Adds a row, one cell a column.
    pub(super) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.iter().map(|cell| human::line(cell).into_owned()).collect());
    }

    /// Whether there is nothing but the heading.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// The text, without a line end after the last row.
    pub(super) fn render(&self) -> String {
        let wide = |cell: &String| cell.chars().count();
        let widths: Vec<usize> = (0..self.right.len())
            .map(|column| self.rows.iter().map(|row| row.get(column).map_or(0, wide)).max().unwrap_or(0))
            .collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).zip(&self.right).map(|((cell, width), right)| match right {
                true => format!("{cell:>width$}"),
                false => format!("{cell:<width$}"),
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_safe() {
        let mut table = Table::new(&["NAME", ">BYTES", "STATE"]);
        assert!(table.is_empty());
        table.row(["default".into(), "25 MiB".into(), "idle".into()]);
        table.row(["x\u{1b}[1m".into(), "1.00 GiB".into(), String::new()]);
        assert_eq!(
            table.render(),
            "NAME           BYTES  STATE\n\
             default       25 MiB  idle\n\
             x\\u{1b}[1m  1.00 GiB"
        );
    }
}
