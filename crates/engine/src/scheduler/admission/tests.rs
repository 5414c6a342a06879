//! The rules of admission as tables of cases, and properties of random ones.
//!
//! A sequence is written as its name (a letter for the request, `A.1` for its second branch), its tenant, and options:
//! `prio 1`, `tokens 9` (of its tenant), `pages 3` (that it claims), for running ones `ran 9`, `restored 4`, `answers 2`,
//! and for waiting ones `lacks 2` (pages) and `in-work`. Earlier letters have waited longer.

use std::cmp::Reverse;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
struct Case {
    free: usize,
    running: Vec<Entry>,
    waiting: Vec<Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    rank: Rank,
    tenant: Tenant,
    tokens: u64,
    pages: f64,
    ran: u64,
    restored: u64,
    answers: usize,
    lacks: usize,
    in_work: bool,
}

impl Entry {
    fn new(request: u64, branch: usize, tenant: &str) -> Self {
        Self {
            rank: Rank { priority: Reverse(0), seniority: request, request, branch },
            tenant: Some(tenant.into()),
            tokens: 0,
            pages: 1.0,
            ran: 100,
            restored: 0,
            answers: 1,
            lacks: 0,
            in_work: false,
        }
    }

    fn read(text: &str) -> Self {
        let mut words = text.split_whitespace();
        let (name, tenant) = (words.next().expect("a name"), words.next().expect("a tenant"));
        let branch = name.get(2..).map_or(0, |branch| branch.parse().unwrap());
        let mut entry = Self::new(u64::from(name.as_bytes()[0] - b'A'), branch, tenant);
        while let Some(option) = words.next() {
            if option == "in-work" {
                entry.in_work = true;
                continue;
            }
            let value: usize = words.next().and_then(|value| value.parse().ok()).expect("a number");
            match option {
                "prio" => entry.rank.priority = Reverse(value as i32),
                "tokens" => entry.tokens = value as u64,
                "pages" => entry.pages = value as f64,
                "ran" => entry.ran = value as u64,
                "restored" => entry.restored = value as u64,
                "answers" => entry.answers = value,
                "lacks" => entry.lacks = value,
                _ => panic!("unknown option {option}"),
            }
        }
        entry
    }

    fn name(&self) -> String {
        let letter = char::from(b'A' + self.rank.request as u8);
        if self.rank.branch == 0 { letter.to_string() } else { format!("{letter}.{}", self.rank.branch) }
    }

    fn candidate(&self) -> Candidate<'_> {
        Candidate { rank: self.rank, tenant: &self.tenant, tenant_tokens: self.tokens }
    }

    fn demand(&self) -> Demand {
        if self.in_work {
            return Demand::InWork;
        }
        Demand::Pages { missing: self.lacks, claim: self.pages }
    }
}

impl Claims for Case {
    fn demand(&self, waiting: usize) -> Demand {
        self.waiting[waiting].demand()
    }

    fn claim(&self, running: usize) -> f64 {
        self.running[running].pages
    }
}

impl Case {
    fn read(free: usize, running: &str, waiting: &str) -> Self {
        let list = |text: &str| {
            text.split(',').map(str::trim).filter(|text| !text.is_empty()).map(Entry::read).collect()
        };
        Self { free, running: list(running), waiting: list(waiting) }
    }

    fn running(&self) -> Vec<Running<'_>> {
        let entries = self.running.iter();
        entries
            .map(|entry| Running {
                candidate: entry.candidate(),
                ran: entry.ran,
                restoring: entry.restored,
                answers: entry.answers,
            })
            .collect()
    }

    fn choose(&self) -> Admission {
        let waiting: Vec<_> = self.waiting.iter().map(Entry::candidate).collect();
        choose(&waiting, &self.running(), self.free, self)
    }

    /// Returns the decision with names: `A`, `A for B C`, or `wait`.
    fn decision(&self) -> String {
        let Admission::Admit { waiting, victims } = self.choose() else { return "wait".into() };
        let admitted = self.waiting[waiting].name();
        let victims: Vec<_> = victims.iter().map(|&victim| self.running[victim].name()).collect();
        if victims.is_empty() { admitted } else { format!("{admitted} for {}", victims.join(" ")) }
    }
}

#[track_caller]
fn check(cases: &[(usize, &str, &str, &str)]) {
    for (free, running, waiting, expected) in cases {
        let case = Case::read(*free, running, waiting);
        assert_eq!(case.decision(), *expected, "{free} free; running {running}; waiting {waiting}");
    }
}

#[test]
fn the_order_of_the_queue_has_five_keys() {
    check(&[
        (1, "", "", "wait"),
        (1, "", "A x, B x", "A"),
        (1, "", "A x, B x prio 1", "B"),
        // Priority decides before the shares of tenants.
        (1, "C y, D y", "A x, B y prio 1", "B"),
        (2, "C x", "A x, B y", "B"),
        // Places decide before tokens.
        (2, "C y", "A x tokens 90, B y tokens 10", "A"),
        (2, "", "A x tokens 90, B y tokens 10", "B"),
        // Within a tenant, the request with fewer places is first.
        (2, "A x", "A.1 x, B x", "B"),
        (2, "", "A.1 x, B x", "A.1"),
    ]);
}

#[test]
fn the_head_is_passed_over_only_while_others_compute_its_prompt_or_hold_its_place() {
    check(&[
        (1, "C x", "A x in-work, B x", "B"),
        (1, "C x", "A x in-work, B x in-work", "wait"),
        // No place for a tenant with its share: the next tenant has a claim to it.
        (0, "A x, B y, C y", "D x, E z", "E for C"),
        (0, "A x, B x", "D x, E x", "wait"),
        // Pages that become free are for the head.
        (1, "A x", "B x lacks 2, C y", "C"),
        (1, "A y", "B x lacks 2, C y", "wait"),
        (1, "A x", "B x lacks 2, C x", "wait"),
    ]);
    let heads = |count: usize| {
        let list: Vec<_> =
            (0..count).map(|at| format!("{} x in-work", char::from(b'B' + at as u8))).collect();
        format!("{}, Z x", list.join(", "))
    };
    check(&[(1, "A x", &heads(MOST_PASSED_OVER), "Z"), (1, "A x", &heads(MOST_PASSED_OVER + 1), "wait")]);
}

#[test]
fn a_higher_priority_preempts_at_once_the_lowest_one_first() {
    check(&[
        (0, "A x ran 0, B x ran 0", "C x prio 1", "C for B"),
        (0, "A x, B x prio 1", "C x prio 2", "C for A"),
        (0, "A x prio 1, B x prio 1", "C x", "wait"),
        (1, "A x pages 2, B x pages 3", "C x prio 1 lacks 4", "C for B A"),
        (1, "A x pages 2, B x pages 3", "C x prio 1 lacks 6", "wait"),
        // Of equal priorities: tenant with more places, then with more tokens, then request with more places.
        (0, "A y, B x, C x", "D z prio 1", "D for C"),
        (0, "A y tokens 9, B x tokens 5", "D z prio 1", "D for A"),
        (0, "A x, A.1 x, B x", "D z prio 1", "D for A.1"),
    ]);
}

#[test]
fn a_tenant_with_more_than_its_share_loses_a_sequence_after_the_quantum() {
    check(&[
        (0, "A x, B x, C y", "D y", "wait"),
        (0, "A x, B x, C x, D y", "E y", "E for C"),
        (0, "A x ran 7, B x ran 7", "C y", "wait"),
        (0, "A x ran 8, B x ran 7", "C y", "C for A"),
        // By pages: the tenant still has as many afterwards.
        (2, "A x pages 4, B x pages 4, C y pages 1", "D y pages 3 lacks 3", "D for B"),
        (2, "A x pages 4, B x pages 4, C y pages 1", "D y pages 4 lacks 3", "wait"),
        // Without a place and pages, it must have more of both. Otherwise it would soon lose the place to the victim.
        (0, "A x pages 4, B x pages 4, C y pages 1", "D y pages 3 lacks 3", "wait"),
        (0, "A x pages 4, B x pages 4, C x pages 4, D y pages 1", "E y pages 3 lacks 3", "E for C"),
    ]);
}

#[test]
fn tenants_that_outnumber_the_places_alternate() {
    check(&[
        (0, "A x tokens 9", "B y tokens 9", "B for A"),
        (0, "A x tokens 9", "B y tokens 10", "wait"),
        (0, "A x tokens 9 ran 7", "B y", "wait"),
        // Lost tokens must have paid.
        (0, "A x tokens 9 ran 19 restored 10", "B y", "wait"),
        (0, "A x tokens 9 ran 20 restored 10", "B y", "B for A"),
        // With a place, a tenant has its turn already.
        (0, "A x tokens 9, B y", "C y", "wait"),
    ]);
}

#[test]
fn requests_of_a_tenant_share_its_places_and_single_answers_go_on() {
    check(&[
        (0, "A x, A.1 x", "B x", "B for A.1"),
        (0, "A x, A.1 x, B x", "B.1 x", "wait"),
        (0, "A x, A.1 x, A.2 x, B x", "B.1 x", "B.1 for A.2"),
        (0, "A x", "B x", "wait"),
        // The last branch of several answers.
        (0, "A x answers 3", "B x", "B for A"),
        (0, "A x answers 3 ran 9 restored 5", "B x", "wait"),
        // A sequence with at least twice the pages.
        (1, "A x pages 8", "B x pages 4 lacks 4", "B for A"),
        (1, "A x pages 7", "B x pages 4 lacks 4", "wait"),
        // Never its own request.
        (0, "A x, A.1 x, A.2 x", "A.3 x", "wait"),
        (0, "A x ran 0, A.1 x", "A.2 x", "wait"),
    ]);
}

/// Every rule names its reason, so that the tables above prove the rule that they are about.
#[test]
fn a_victim_has_the_first_rule_that_fits() {
    for (running, claimant, expected) in [
        ("A x", "B x prio 1", Some(Rule::Priority)),
        ("A x, C x", "B y", Some(Rule::TenantHasMore)),
        ("A x", "B y", Some(Rule::TenantsAlternate)),
        ("A x, A.1 x", "B x", Some(Rule::RequestHasMore)),
        ("A x answers 2", "B x", Some(Rule::RequestsAlternate)),
        ("A x", "B x", None),
    ] {
        let case = Case::read(0, running, claimant);
        let (running, claimant) = (case.running(), case.waiting[0].candidate());
        let mut shares = Shares::default();
        running.iter().for_each(|running| shares.add(&running.candidate, 1.0));
        let starves = Starves {
            tenant: shares.tenant(&claimant).places == 0,
            request: shares.request(&claimant).places == 0,
        };
        let short = Shortage { places: 1, pages: 0.0, claim: 1.0 };
        assert_eq!(rule(&claimant, starves, short, &running[0], 1.0, &shares), expected, "{case:?}");
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let entry = (0..12_u64, 0..3_usize, (0..4_usize, 0..3_i32, 0..4_u64), 1..6_u32, (0..12_u64, 0..8_u64));
    let waits = (0..4_usize, prop::bool::weighted(0.2));
    (0..3_usize, prop::collection::vec((entry, waits, any::<bool>()), 1..16)).prop_map(|(free, entries)| {
        let mut case = Case { free, running: Vec::new(), waiting: Vec::new() };
        let mut seen = std::collections::BTreeSet::new();
        for ((request, branch, (tenant, priority, tokens), pages, (ran, restored)), (lacks, in_work), runs) in
            entries
        {
            if !seen.insert((request, branch)) {
                continue;
            }
            // Requests belong to one tenant, and tenants have one number of tokens.
            let tenant = (request as usize + tenant / 4) % 4;
            let mut entry = Entry::new(request, branch, ["w", "x", "y", "z"][tenant]);
            entry.rank.priority = Reverse(priority * i32::from(request % 3 == 0));
            entry.tokens = tenant as u64 * 10 + tokens / 4;
            (entry.pages, entry.ran, entry.restored) = (f64::from(pages), ran, restored);
            entry.answers = 1 + usize::from(request % 2 == 0);
            (entry.lacks, entry.in_work) = (lacks, in_work);
            if runs { case.running.push(entry) } else { case.waiting.push(entry) }
        }
        case
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn decisions_do_not_depend_on_the_order_of_the_lists(case in cases(), rotation in 0..16_usize) {
        let mut other = case.clone();
        if !other.running.is_empty() {
            let rotation = rotation % other.running.len();
            other.running.rotate_left(rotation);
        }
        other.waiting.reverse();
        prop_assert_eq!(case.decision(), other.decision());
    }

    #[test]
    fn victims_cover_the_shortage_and_none_is_needless(case in cases()) {
        let Admission::Admit { waiting, victims } = case.choose() else { return Ok(()) };
        let head = &case.waiting[waiting];
        prop_assert!(!head.in_work);
        let covers = |victims: &[usize]| {
            let pages: f64 = victims.iter().map(|&victim| case.running[victim].pages).sum();
            case.free + victims.len() > 0 && pages >= head.lacks as f64
        };
        prop_assert!(covers(&victims));
        prop_assert!(victims.is_empty() || !covers(&victims[..victims.len() - 1]));
        for victim in victims.iter().map(|&victim| &case.running[victim]) {
            // Reversed: the victim's priority is at most that of the head.
            prop_assert!(victim.rank.priority >= head.rank.priority);
            if victim.rank.priority == head.rank.priority {
                prop_assert!(victim.ran >= QUANTUM && victim.rank.request != head.rank.request);
            }
        }
    }

    /// Only heads whose prompts are in work, or whose tenants have their shares of places, are passed over.
    #[test]
    fn nobody_overtakes_a_head_that_has_room(case in cases()) {
        let mut shares = Shares::default();
        let running = case.running();
        running.iter().for_each(|running| shares.add(&running.candidate, 0.0));
        let order = |entry: &&Entry| {
            let candidate = entry.candidate();
            let (tenant, request) = (shares.tenant(&candidate).places, shares.request(&candidate).places);
            (entry.rank.priority, tenant, entry.tokens, request, entry.rank)
        };
        let head = case.waiting.iter().filter(|entry| !entry.in_work).min_by_key(order);
        match (case.choose(), head) {
            (Admission::Admit { waiting, .. }, Some(head)) if case.waiting[waiting].rank != head.rank => {
                prop_assert!(case.free == 0 && head.lacks == 0);
                prop_assert_ne!(&case.waiting[waiting].tenant, &head.tenant);
            }
            (Admission::Admit { .. }, head) => prop_assert!(head.is_some()),
            (Admission::Wait, Some(head)) => prop_assert!(case.free == 0 || head.lacks > 0),
            (Admission::Wait, None) => {}
        }
    }

    /// After a preemption for a share, the victim does not preempt the admitted sequence for the same reason.
    #[test]
    fn shares_never_preempt_alternately(mut case in cases()) {
        let Admission::Admit { waiting, victims } = case.choose() else { return Ok(()) };
        let [victim] = victims[..] else { return Ok(()) };
        let (mut admitted, victim) = (case.waiting.remove(waiting), case.running.remove(victim));
        (admitted.ran, admitted.restored) = (QUANTUM, 0);
        case.running.push(admitted);
        let running = case.running();
        let mut shares = Shares::default();
        running.iter().zip(&case.running).for_each(|(running, entry)| shares.add(&running.candidate, entry.pages));
        let last = running.last().unwrap();
        for short in [
            Shortage { places: 1, pages: 0.0, claim: victim.pages },
            Shortage { places: 0, pages: 1.0, claim: victim.pages },
        ] {
            // The shortage for which it lost its place.
            if (short.places > 0) != (case.free == 0) {
                continue;
            }
            let starves = Starves { tenant: false, request: false };
            let rule = rule(&victim.candidate(), starves, short, last, case.running.last().unwrap().pages, &shares);
            prop_assert!(rule.is_none(), "{rule:?}");
        }
    }
}
