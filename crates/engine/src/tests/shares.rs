//! Fair shares of places, pages and rows, as [scripts](super::script) with results.

use expect_test::expect;

use super::{
    fake::VOCAB,
    rig::{Rig, Setup},
    script::check,
};
use crate::Request;

#[test]
fn a_tenant_that_comes_gets_its_share_of_the_places_of_one_request() {
    check(
        "sequences 4, pages 64",
        "A 4 +30 x4 by x \n step 9 \n B 4 +4 x3 by y \n run",
        expect![[r#"
            run A 0..4; free 63 cached 0
            run A 4, A.1 4, A.2 4, A.3 4; free 59 cached 0
            run A 5, A.1 5, A.2 5, A.3 5; free 59 cached 0
            run A 6, A.1 6, A.2 6, A.3 6; free 59 cached 0
            run A 7, A.1 7, A.2 7, A.3 7; free 59 cached 0
            run A 8, A.1 8, A.2 8, A.3 8; free 55 cached 0
            run A 9, A.1 9, A.2 9, A.3 9; free 55 cached 0
            run A 10, A.1 10, A.2 10, A.3 10; free 55 cached 0
            run A 11, A.1 11, A.2 11, A.3 11; free 55 cached 0
            run A 12, A.1 12, B 0..4; hold A.2 A.3 B.2; free 52 cached 4
            run A 13, A.1 13, B 4, B.1 4; hold A.2 A.3 B.2; free 50 cached 4
            run A 14, A.1 14, B 5, B.1 5; hold A.2 A.3 B.2; free 50 cached 4
            run A 15, A.1 15, B 6, B.1 6; hold A.2 A.3 B.2; free 52 cached 5
              B: Length
              B.1: Length
            run A 16, A.1 16, A.2 12, B.2 0..4; hold A.3; free 48 cached 3
            run A 17, A.1 17, A.2 13, B.2 4; hold A.3; free 47 cached 3
            run A 18, A.1 18, A.2 14, B.2 5; hold A.3; free 47 cached 3
            run A 19, A.1 19, A.2 15, B.2 6; hold A.3; free 49 cached 3
              B.2: Length
            run A 20, A.1 20, A.2 16, A.3 12; free 45 cached 1
            run A 21, A.1 21, A.2 17, A.3 13; free 45 cached 1
            run A 22, A.1 22, A.2 18, A.3 14; free 45 cached 1
            run A 23, A.1 23, A.2 19, A.3 15; free 45 cached 1
            run A 24, A.1 24, A.2 20, A.3 16; free 41 cached 1
            run A 25, A.1 25, A.2 21, A.3 17; free 41 cached 1
            run A 26, A.1 26, A.2 22, A.3 18; free 41 cached 1
            run A 27, A.1 27, A.2 23, A.3 19; free 41 cached 1
            run A 28, A.1 28, A.2 24, A.3 20; free 37 cached 1
            run A 29, A.1 29, A.2 25, A.3 21; free 37 cached 1
            run A 30, A.1 30, A.2 26, A.3 22; free 37 cached 1
            run A 31, A.1 31, A.2 27, A.3 23; free 37 cached 1
            run A 32, A.1 32, A.2 28, A.3 24; free 35 cached 15
              A: Length
              A.1: Length
            run A.2 29, A.3 25; free 35 cached 15
            run A.2 30, A.3 26; free 35 cached 15
            run A.2 31, A.3 27; free 35 cached 15
            run A.2 32, A.3 28; free 34 cached 22
              A.2: Length
            run A.3 29; free 34 cached 22
            run A.3 30; free 34 cached 22
            run A.3 31; free 34 cached 22
            run A.3 32; free 34 cached 30
              A.3: Length
        "#]],
    );
}

#[test]
fn tenants_that_outnumber_the_places_take_turns() {
    check(
        "sequences 1",
        "A 4 +20 by x \n step 2 \n B 4 +12 by y \n run",
        expect![[r#"
        run A 0..4; free 15 cached 0
        run A 4; free 14 cached 0
        run A 5; hold B; free 14 cached 0
        run A 6; hold B; free 14 cached 0
        run A 7; hold B; free 14 cached 0
        run A 8; hold B; free 13 cached 0
        run A 9; hold B; free 13 cached 0
        run A 10; hold B; free 13 cached 0
        run B 0..4; hold A; free 13 cached 2
        run B 4; hold A; free 12 cached 2
        run B 5; hold A; free 12 cached 2
        run B 6; hold A; free 12 cached 2
        run B 7; hold A; free 12 cached 2
        run B 8; hold A; free 11 cached 2
        run B 9; hold A; free 11 cached 2
        run B 10; hold A; free 11 cached 2
        run A 8..12; hold B; free 11 cached 2
        run A 12; hold B; free 10 cached 2
        run A 13; hold B; free 10 cached 2
        run A 14; hold B; free 10 cached 2
        run A 15; hold B; free 10 cached 2
        run A 16; hold B; free 9 cached 2
        run A 17; hold B; free 9 cached 2
        run A 18; hold B; free 9 cached 2
        run B 8..12; hold A; free 9 cached 4
        run B 12; hold A; free 8 cached 4
        run B 13; hold A; free 8 cached 4
        run B 14; hold A; free 9 cached 7
          B: Length
        run A 16..20; free 8 cached 3
        run A 20; free 7 cached 3
        run A 21; free 7 cached 3
        run A 22; free 8 cached 8
          A: Length
    "#]],
    );
}

#[test]
fn requests_of_one_tenant_share_its_places() {
    check(
        "sequences 3, pages 64",
        "A 4 +24 x3 \n step 9 \n B 4 +6 x2 \n C 4 +2 \n run",
        expect![[r#"
            run A 0..4; free 63 cached 0
            run A 4, A.1 4, A.2 4; free 60 cached 0
            run A 5, A.1 5, A.2 5; free 60 cached 0
            run A 6, A.1 6, A.2 6; free 60 cached 0
            run A 7, A.1 7, A.2 7; free 60 cached 0
            run A 8, A.1 8, A.2 8; free 57 cached 0
            run A 9, A.1 9, A.2 9; free 57 cached 0
            run A 10, A.1 10, A.2 10; free 57 cached 0
            run A 11, A.1 11, A.2 11; free 57 cached 0
            run A 12, B 0..4, C 0..4; hold B.1 A.2 A.1; free 54 cached 4
            run A 13, B 4, C 4; hold B.1 A.2 A.1; free 53 cached 5
              C: Length
            run A 14, B 5, B.1 0..4; hold A.2 A.1; free 52 cached 5
            run A 15, B 6, B.1 4; hold A.2 A.1; free 51 cached 5
            run A 16, B 7, B.1 5; hold A.2 A.1; free 50 cached 5
            run A 17, B 8, B.1 6; hold A.2 A.1; free 50 cached 7
              B: Length
            run A 18, B.1 7, A.2 12; hold A.1; free 49 cached 5
            run A 19, B.1 8, A.2 13; hold A.1; free 50 cached 6
              B.1: Length
            run A 20, A.2 14, A.1 12; free 48 cached 4
            run A 21, A.2 15, A.1 13; free 48 cached 4
            run A 22, A.2 16, A.1 14; free 47 cached 4
            run A 23, A.2 17, A.1 15; free 47 cached 4
            run A 24, A.2 18, A.1 16; free 45 cached 4
            run A 25, A.2 19, A.1 17; free 45 cached 4
            run A 26, A.2 20, A.1 18; free 45 cached 9
              A: Length
            run A.2 21, A.1 19; free 45 cached 9
            run A.2 22, A.1 20; free 44 cached 9
            run A.2 23, A.1 21; free 44 cached 9
            run A.2 24, A.1 22; free 43 cached 9
            run A.2 25, A.1 23; free 43 cached 9
            run A.2 26, A.1 24; free 43 cached 14
              A.2: Length
            run A.1 25; free 43 cached 14
            run A.1 26; free 44 cached 20
              A.1: Length
        "#]],
    );
}

#[test]
fn a_request_for_many_answers_gives_its_last_place_to_one_without() {
    check(
        "sequences 2, pages 32",
        "A 4 +16 x2 \n step 4 \n B 4 +9 \n C 5 +9 \n D 5 +2 \n run",
        expect![[r#"
            run A 0..4; free 31 cached 0
            run A 4, A.1 4; free 29 cached 0
            run A 5, A.1 5; free 29 cached 0
            run A 6, A.1 6; free 29 cached 0
            run A 7, A.1 7; hold B C D; free 29 cached 0
            run A 8, A.1 8; hold B C D; free 27 cached 0
            run A 9, A.1 9; hold B C D; free 27 cached 0
            run A 10, A.1 10; hold B C D; free 27 cached 0
            run B 0..4, C 0..5; hold D A.1 A; free 26 cached 3
            run B 4, C 5; hold D A.1 A; free 25 cached 3
            run B 5, C 6; hold D A.1 A; free 25 cached 3
            run B 6, C 7; hold D A.1 A; free 25 cached 3
            run B 7, C 8; hold D A.1 A; free 24 cached 3
            run B 8, C 9; hold D A.1 A; free 23 cached 3
            run B 9, C 10; hold D A.1 A; free 23 cached 3
            run B 10, C 11; hold D A.1 A; free 23 cached 3
            run B 11, C 12; hold D A.1 A; free 23 cached 9
              B: Length
              C: Length
            run D 0..5, A.1 8..12; hold A; free 20 cached 7
            run D 5, A.1 12; hold A; free 20 cached 8
              D: Length
            run A.1 13, A 8..12; free 19 cached 7
            run A.1 14, A 12; free 18 cached 7
            run A.1 15, A 13; free 18 cached 7
            run A.1 16, A 14; free 17 cached 7
            run A.1 17, A 15; free 17 cached 7
            run A.1 18, A 16; free 17 cached 10
              A.1: Length
            run A 17; free 17 cached 10
            run A 18; free 18 cached 14
              A: Length
        "#]],
    );
}

#[test]
fn a_higher_priority_takes_the_place_of_a_lower_one_at_once() {
    check(
        "sequences 1",
        "A 4 +5 \n step 2 \n B 4 +2 prio 1 \n run",
        expect![[r#"
        run A 0..4; free 15 cached 0
        run A 4; free 14 cached 0
        run B 0..4; hold A; free 14 cached 1
        run B 4; hold A; free 14 cached 2
          B: Length
        run A 4..6; free 13 cached 1
        run A 6; free 13 cached 1
        run A 7; free 13 cached 3
          A: Length
    "#]],
    );
}

#[test]
fn a_small_request_does_not_wait_for_the_pages_of_a_long_prompt() {
    check(
        "sequences 4, pages 24, rows 6",
        "A 80 +2 by x \n step 9 \n B 6 +2 by x \n C 6 +2 by y \n run",
        expect![[r#"
            run A 0..6; free 22 cached 0
            run A 6..12; free 21 cached 0
            run A 12..18; free 19 cached 0
            run A 18..24; free 18 cached 0
            run A 24..30; free 16 cached 0
            run A 30..36; free 15 cached 0
            run A 36..42; free 13 cached 0
            run A 42..48; free 12 cached 0
            run A 48..54; free 10 cached 0
            run B 0..6; hold C A; free 9 cached 13
            run B 6, C 0..5; hold A; free 8 cached 14
              B: Length
            run C 5, A 52..57; free 6 cached 1
            run C 6, A 57..62; free 6 cached 2
              C: Length
            run A 62..68; free 5 cached 2
            run A 68..74; free 3 cached 2
            run A 74..80; free 2 cached 2
            run A 80; free 2 cached 22
              A: Length
        "#]],
    );
}

#[test]
fn shorter_prompts_pass_a_long_one_but_do_not_hold_it_up() {
    check(
        "pages 200, rows 40, sequences 20",
        "A 400 +1 \n step \n B 30 +1 \n C 30 +1 \n D 30 +1 \n E 30 +1 \n F 30 +1 \n G 30 +1 \n H 8 +1 \n run",
        expect![[r#"
            run A 0..40; free 190 cached 0
            run B 0..30, C 0..2, H 0..8; hold A D E F G; free 180 cached 9
              B: Length
              H: Length
            run C 2..30, D 0..12; hold A E F G; free 171 cached 16
              C: Length
            run D 12..30, E 0..22; hold A F G; free 161 cached 23
              D: Length
            run A 40..67, E 22..30, F 0..5; hold G; free 151 cached 30
              E: Length
            run A 67..104, F 5..8; hold G; free 142 cached 30
            run A 104..139, F 8..13; hold G; free 131 cached 30
            run A 139..175, F 13..17; hold G; free 121 cached 30
            run A 175..211, F 17..21; hold G; free 111 cached 30
            run A 211..246, F 21..26; hold G; free 101 cached 30
            run A 246..282, F 26..30; hold G; free 92 cached 37
              F: Length
            run A 282..317, G 0..5; free 81 cached 37
            run A 317..353, G 5..9; free 71 cached 37
            run A 353..388, G 9..14; free 62 cached 37
            run A 388..400, G 14..30; free 56 cached 144
              A: Length
              G: Length
        "#]],
    );
}

#[test]
fn where_rows_take_long_the_stream_of_another_tenant_comes_first() {
    check(
        "sequences 8, pages 64, rows 16, row 40",
        "A 4 +40 x7 by x \n step 12 \n B 4 +9 by y \n step 10",
        expect![[r#"
            run A 0..4; free 63 cached 0
            run A 4, A.1 4, A.2 4, A.3 4, A.4 4, A.5 4, A.6 4; free 56 cached 0
            run A 5, A.1 5, A.2 5, A.3 5, A.4 5, A.5 5, A.6 5; free 56 cached 0
            run A 6, A.1 6, A.2 6, A.3 6, A.4 6, A.5 6, A.6 6; free 56 cached 0
            run A 7, A.1 7, A.2 7, A.3 7, A.4 7, A.5 7, A.6 7; free 56 cached 0
            run A 8, A.1 8, A.2 8, A.3 8, A.4 8, A.5 8, A.6 8; free 49 cached 0
            run A 9, A.1 9, A.2 9, A.3 9, A.4 9, A.5 9, A.6 9; free 49 cached 0
            run A 10, A.1 10, A.2 10, A.3 10, A.4 10, A.5 10, A.6 10; free 49 cached 0
            run A 11, A.1 11, A.2 11, A.3 11, A.4 11, A.5 11, A.6 11; free 49 cached 0
            run A 12, A.1 12, A.2 12, A.3 12, A.4 12, A.5 12, A.6 12; free 42 cached 0
            run A 13, A.1 13, A.2 13, A.3 13, A.4 13, A.5 13, A.6 13; free 42 cached 0
            run A 14, A.1 14, A.2 14, A.3 14, A.4 14, A.5 14, A.6 14; free 42 cached 0
            run A 15, A.1 15, A.2 15, A.3 15, A.4 15, A.5 15, A.6 15, B 0..4; free 41 cached 0
            run A 16, A.1 16, A.2 16, A.3 16, B 4; hold A.4 A.5 A.6; free 36 cached 0
            run A 17, A.4 16, A.5 16, A.6 16, B 5; hold A.1 A.2 A.3; free 33 cached 0
            run A 18, A.1 17, A.2 17, A.3 17, B 6; hold A.4 A.5 A.6; free 33 cached 0
            run A 19, A.4 17, A.5 17, A.6 17, B 7; hold A.1 A.2 A.3; free 33 cached 0
            run A 20, A.1 18, A.2 18, A.3 18, B 8; hold A.4 A.5 A.6; free 31 cached 0
            run A 21, A.4 18, A.5 18, A.6 18, B 9; hold A.1 A.2 A.3; free 31 cached 0
            run A 22, A.1 19, A.2 19, A.3 19, B 10; hold A.4 A.5 A.6; free 31 cached 0
            run A 23, A.4 19, A.5 19, A.6 19, B 11; hold A.1 A.2 A.3; free 31 cached 3
              B: Length
            run A 24, A.1 20, A.2 20, A.3 20, A.4 20, A.5 20, A.6 20; free 24 cached 3
        "#]],
    );
}

/// Beside a stream no step takes long for any depth and speed of the prompt, and the total delay of the stream is at
/// most that of the steps that the prompt needs.
#[test]
fn a_long_prompt_makes_no_long_gaps() {
    use std::time::Duration;

    let times = [15_000, 7_000, 1].map(Duration::from_micros);
    let setup = Setup { pages: 4000, rows: 512, sequences: 64, max_context: 9000, times, ..Setup::default() };
    let mut rig = Rig::new(&setup).unwrap();
    let prompt = |tokens, family: usize| (0..tokens).map(|at| ((at * 7 + family) % VOCAB) as u32).collect();
    rig.submit(&Request { max_tokens: Some(2000), ..Request::new(prompt(20, 1)) }).unwrap();
    (0..20).for_each(|_| drop(rig.step().unwrap()));
    let long = rig.submit(&Request { max_tokens: Some(1), ..Request::new(prompt(8000, 2)) }).unwrap();
    let (mut total, mut steps) = (Duration::ZERO, 0);
    while rig.heard[&long].branches.is_empty() {
        rig.step().unwrap();
        assert!(rig.took < Duration::from_millis(250), "{:?} after {steps} steps", rig.took);
        total += rig.took;
        steps += 1;
    }
    let alone = times[1] * 8000 + times[2] * (8000 * 8000 / 2);
    assert!(total < alone * 3 / 2, "{total:?} where the rows take {alone:?}");
}

/// A request of one key with a long prompt, and a short one of the same key later.
#[test]
fn a_short_prompt_soon_has_its_first_token() {
    use std::time::Duration;

    let times = [15_000, 7_000, 1].map(Duration::from_micros);
    let setup = Setup { pages: 4000, rows: 512, sequences: 64, max_context: 9000, times, ..Setup::default() };
    let prompt = |tokens, family: usize| (0..tokens).map(|at| ((at * 7 + family) % VOCAB) as u32).collect();
    let time = |short: bool| {
        let mut rig = Rig::new(&setup).unwrap();
        let long = rig.submit(&Request { max_tokens: Some(1), ..Request::new(prompt(6400, 2)) }).unwrap();
        let mut now = Duration::ZERO;
        while now < Duration::from_millis(1500) {
            rig.step().unwrap();
            now += rig.took;
        }
        if short {
            let short = Request { max_tokens: Some(1), ..Request::new(prompt(37, 1)) };
            let (short, since) = (rig.submit(&short).unwrap(), now);
            while rig.heard[&short].branches.is_empty() {
                rig.step().unwrap();
                now += rig.took;
            }
            assert!(now - since < Duration::from_millis(1000), "{:?}", now - since);
        }
        while rig.heard[&long].branches.is_empty() {
            rig.step().unwrap();
            now += rig.took;
        }
        now
    };
    let (alone, beside) = (time(false), time(true));
    assert!(beside < alone * 11 / 10, "{beside:?} instead of {alone:?}");
}
