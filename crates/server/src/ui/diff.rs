//! Sets of page numbers as runs `[first, length]`, and their differences.

/// A run of consecutive pages: the first one and the length.
pub type Run = [u32; 2];

/// Joins consecutive pages to runs. The order of the pages does not change.
pub fn runs(pages: &[u32]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &page in pages {
        match runs.last_mut() {
            Some([first, length]) if *first + *length == page => *length += 1,
            _ => runs.push([page, 1]),
        }
    }
    runs
}

/// Returns the pages of `these` that are not in `others`. Both are in ascending order.
pub fn minus(these: &[Run], others: &[Run]) -> Vec<Run> {
    let mut left = Vec::new();
    let mut others = others.iter().peekable();
    for &[first, length] in these {
        let (mut at, end) = (first, first + length);
        while let Some(&&[other, length]) = others.peek() {
            if other >= end {
                break;
            }
            if other > at {
                left.push([at, other - at]);
            }
            at = at.max(other + length);
            if at >= end {
                break;
            }
            others.next();
        }
        if at < end {
            left.push([at, end - at]);
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn pages(runs: &[Run]) -> Vec<u32> {
        runs.iter().flat_map(|&[first, length]| first..first + length).collect()
    }

    proptest! {
        #[test]
        fn runs_and_differences_are_those_of_sets(a: BTreeSet<u8>, b: BTreeSet<u8>) {
            let list = |set: &BTreeSet<u8>| set.iter().map(|&page| page.into()).collect::<Vec<u32>>();
            let (a_runs, b_runs) = (runs(&list(&a)), runs(&list(&b)));
            prop_assert_eq!(pages(&a_runs), list(&a));
            prop_assert_eq!(pages(&minus(&a_runs, &b_runs)), list(&(&a - &b)));
        }
    }
}
