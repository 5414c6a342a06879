//! Sets of characters.

/// A set of code points as ranges, in order and apart from each other. Surrogates may be in it and mean nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CharSet(Vec<(u32, u32)>);

const LAST: u32 = char::MAX as u32;

impl CharSet {
    /// Returns the set of these ranges, both ends included.
    pub fn new(mut ranges: Vec<(u32, u32)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (low, high) in ranges {
            match merged.last_mut() {
                Some(last) if low <= last.1.saturating_add(1) => last.1 = last.1.max(high),
                _ => merged.push((low, high)),
            }
        }
        Self(merged)
    }

    pub fn all() -> Self {
        Self(vec![(0, LAST)])
    }

    pub fn one(char: char) -> Self {
        Self(vec![(char.into(), char.into())])
    }

    pub fn complement(&self) -> Self {
        let mut ranges = Vec::with_capacity(self.0.len() + 1);
        let mut next = 0;
        for &(low, high) in &self.0 {
            if low > next {
                ranges.push((next, low - 1));
            }
            next = high + 1;
        }
        if next <= LAST {
            ranges.push((next, LAST));
        }
        Self(ranges)
    }

    pub fn union(&self, other: &Self) -> Self {
        if self.0.is_empty() {
            return other.clone();
        }
        Self::new([self.0.as_slice(), &other.0].concat())
    }

    pub fn intersects(&self, other: &Self) -> bool {
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some(left), Some(right)) = (a.peek(), b.peek()) {
            if left.1 < right.0 {
                a.next();
            } else if right.1 < left.0 {
                b.next();
            } else {
                return true;
            }
        }
        false
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the ranges of characters, without surrogates at their ends.
    pub fn ranges(&self) -> impl Iterator<Item = (char, char)> {
        const SURROGATES: std::ops::RangeInclusive<u32> = 0xD800..=0xDFFF;
        self.0.iter().filter_map(|&(low, high)| {
            let low = if SURROGATES.contains(&low) { SURROGATES.end() + 1 } else { low };
            let high = if SURROGATES.contains(&high) { SURROGATES.start() - 1 } else { high };
            (low <= high).then(|| Some((char::from_u32(low)?, char::from_u32(high)?)))?
        })
    }
}
