/* Who keeps a ring: writers that are killed and succeeded, each with a supervisor of its own, supervisors that are killed
 * and started again, listeners that are adopted, the last one that unlinks the segment.
 *
 * A lock is the kernel's: free as soon as its holder is dead, taken by one at a time. Two supervisors are two processes;
 * supervisor v belongs to writer v, of which the second is the successor that takes the ring over. A supervisor knows
 * whom it started (`own`) and sees, in the segment, whoever lives. The unread payload stands for all of them.
 *
 * Defines: WRITERS is 1 or 2; MUT_* plants a fault. */

#ifndef WRITERS
#define WRITERS 2
#endif
#define NOBODY 9

bool S1_port_served_twice;
bool S2_unlinked_with_payloads_in_time;
bool S3_stuck;
bool S4_generation_begun_anew;

/* the segment */
bool linked = true;
bool unread = true, in_time = true;     /* in_time: linger_s is not over */
byte gen = 1;
byte keeper = 0;                /* who has the writer's lock */
byte holder = NOBODY;           /* who has the supervisor's lock */
bool listening = false;         /* a living listener, on the ring's port */

byte born = 1;                  /* writers so far */
bool over[2];                   /* this supervisor's work is done, or its writer is */
bool waits[2];                  /* started, and not yet the holder */
bool starting = false;          /* the holder starts a listener, having seen none */
bool calm = false;

#define WRITER_ALIVE (keeper != NOBODY)
inline unlink() {
  assert(!unread || !in_time || !linked || S2_unlinked_with_payloads_in_time);
  linked = false
}
#ifdef MUT_LISTENER_NOT_ADOPTED
#define SEES_NONE true
#else
#define SEES_NONE (!listening)
#endif
#ifdef MUT_STOPS_WITH_ITS_WRITER
#define NEEDED(v) (keeper == v)
#else
#define NEEDED(v) (WRITER_ALIVE || (unread && in_time))
#endif
#define SUCCEEDED(v) (WRITER_ALIVE && keeper != v)
#define SUPERVISOR_OPTIONS(v) \
  :: d_step { waits[v] && linked && holder == NOBODY -> waits[v] = false; holder = v; \
       printf("supervisor %d holds the ring\n", v) } \
  :: d_step { waits[v] && !linked -> waits[v] = false; over[v] = true }  /* there is nothing left to serve */ \
  :: d_step { holder == v && SEES_NONE && !starting && NEEDED(v) && !SUCCEEDED(v) -> starting = true } \
  :: d_step { holder == v && starting -> starting = false; \
       assert(!listening || S1_port_served_twice); listening = true; printf("supervisor %d: a listener\n", v) } \
  :: d_step { holder == v && (!NEEDED(v) || SUCCEEDED(v)) && listening -> listening = false }   /* SIGTERM, waited for */ \
  :: d_step { holder == v && !listening && !starting && (!NEEDED(v) || SUCCEEDED(v)) -> \
       holder = NOBODY; over[v] = true; LAST_LOOK \
       printf("supervisor %d ends\n", v) } \
  :: d_step { !calm && holder == v -> holder = NOBODY; starting = false; printf("supervisor %d is killed\n", v) } \
  :: d_step { keeper == v && holder != v && !waits[v] && linked -> waits[v] = true; over[v] = false }   /* its writer starts it again */
/* unlink_if_last: no owner and no keeper lives */
#ifdef MUT_UNLINKED_WHILE_KEPT
#define LAST_LOOK unlink();
#else
#define LAST_LOOK if :: !WRITER_ALIVE && !listening && linked -> unlink() :: else fi;
#endif

active proctype Everybody() {
  waits[0] = true;
end:
  do
  SUPERVISOR_OPTIONS(0)
#if WRITERS > 1
  SUPERVISOR_OPTIONS(1)
  :: d_step { born < WRITERS && keeper == NOBODY && linked && !calm -> /* takes the ring over */
       keeper = born; born++;
#ifdef MUT_TAKE_OVER_STARTS_ANEW
       gen = 0;
#endif
       assert(gen == 1 || S4_generation_begun_anew);
       printf("writer %d has the ring\n", keeper) }
#endif
  :: d_step { !calm && keeper != NOBODY -> printf("writer %d is killed\n", keeper); keeper = NOBODY }
  :: d_step { !calm && listening -> listening = false; printf("the listener is killed\n") }
  :: d_step { listening && unread -> unread = false }          /* read, and acknowledged */
  :: d_step { !WRITER_ALIVE && in_time -> in_time = false }                     /* linger_s is over */
#ifndef MUT_ORPHANS_STAY
  /* a listener without writer and supervisor: lingers like one, then unlinks */
  :: d_step { listening && !WRITER_ALIVE && holder == NOBODY && (!unread || !in_time) -> listening = false; unlink() }
#endif
  /* nobody is left: whoever comes next (a writer at its start, `transport reclaim`) finds every lock free */
#ifndef MUT_NOBODY_LOOKS
  :: d_step { linked && !listening && !WRITER_ALIVE && holder == NOBODY && !waits[0] && !waits[1] && (!unread || !in_time) -> unlink() }
#endif
  :: d_step { linked && waits[0] && keeper != 0 && !calm -> waits[0] = false }  /* killed before it held it */
  :: d_step { linked && waits[1] && keeper != 1 && !calm -> waits[1] = false }
  od
}

active proctype End() {
  calm = true;
  timeout;
  /* somebody keeps it, and then it is served and read; or nobody does, and nothing is left of it */
  assert((WRITER_ALIVE && linked && listening && !unread) || (!WRITER_ALIVE && !linked && !listening && holder == NOBODY) || S3_stuck)
}
